"""DFlash and DSpark heads as token sources: all tokens of a block in one draft pass."""
