"""``python tools/bench faults``: seconds from a fault to the next token."""
