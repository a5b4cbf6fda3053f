"""The role ``verify``: a pure machine."""
