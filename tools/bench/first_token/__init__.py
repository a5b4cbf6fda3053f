"""``python tools/bench prompts``: how fast prompts are read."""
