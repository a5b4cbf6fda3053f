"""``python tools/bench growth``: what a pass and a step cost as the work grows."""
