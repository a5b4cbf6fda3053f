"""Draft models, and heads that read the target's hidden states."""
