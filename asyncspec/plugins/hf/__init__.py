"""Hugging Face checkpoints as pipeline stages and draft models (docs/reference/exactness.md)."""
