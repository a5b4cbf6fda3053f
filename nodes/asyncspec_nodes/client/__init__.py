"""Asking a cluster that runs."""
