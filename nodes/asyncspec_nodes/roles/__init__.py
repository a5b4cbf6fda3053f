"""The roles as pure state machines: draft node, verify stage, token source."""
