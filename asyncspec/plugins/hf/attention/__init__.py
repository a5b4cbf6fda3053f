"""Attention and caches of tree nodes, and layers with other states."""
