"""The role `verify`: a pure state machine."""
