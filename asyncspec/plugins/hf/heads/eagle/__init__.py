"""EAGLE heads as token sources. ``description``, ``layouts`` and ``geometry`` need no torch."""
