"""Clusters on a virtual clock: how fast they would be, and which layers should go where."""
