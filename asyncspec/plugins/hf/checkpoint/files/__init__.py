"""Files of checkpoints: what their headers say, the Hub, and the bytes that a stage reads."""
