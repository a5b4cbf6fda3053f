"""Decoder layers in fewer operations than transformers takes, with the same bits."""
