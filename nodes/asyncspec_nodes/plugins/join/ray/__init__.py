"""Machines of a cluster as actors of an existing Ray cluster."""
