"""``python tools/bench peers``: our policies against each other and against other engines."""
