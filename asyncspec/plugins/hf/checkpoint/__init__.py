"""Checkpoints: files, formats of weights, configurations and tokenizers."""
