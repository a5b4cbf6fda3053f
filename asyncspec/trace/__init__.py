"""Traces: what every node did and when, on one clock (docs/reference/trace.md)."""
