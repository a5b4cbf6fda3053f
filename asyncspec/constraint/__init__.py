"""Constrained decoding: which tokens may follow a path (docs/reference/sampling.md)."""
