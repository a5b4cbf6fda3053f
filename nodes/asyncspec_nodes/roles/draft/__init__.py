"""The role `draft`: a pure state machine."""
