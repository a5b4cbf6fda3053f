"""The role ``draft``: a pure machine."""
