"""EAGLE heads as token sources. Only ``geometry`` needs no torch."""
