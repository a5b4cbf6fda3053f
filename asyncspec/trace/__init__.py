"""Traces: what every node did and when, on one clock (docs/trace.md)."""
