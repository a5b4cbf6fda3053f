"""``asyncspec demo``: two policies side by side."""
