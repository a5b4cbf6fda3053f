"""Tests of processes as on macOS, as far as Linux can be made to look like it."""
