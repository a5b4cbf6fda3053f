"""``python tools/bench limits``: how near the pipeline runs to its own limit, as ratios."""
