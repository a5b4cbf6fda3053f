"""Requests with text, as users make them, on top of tokens."""
