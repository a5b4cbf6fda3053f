"""Hugging Face checkpoints as pipeline stages and draft models (docs/reference/exactness.md).

Nothing is imported here: ``inspect`` must stay usable before torch is loaded.
"""
