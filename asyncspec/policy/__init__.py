"""Speculation policies: one small pure module each, all on the same machines."""
