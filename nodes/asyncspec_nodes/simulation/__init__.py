"""The role machines on a virtual clock, and replayed from a recording."""
