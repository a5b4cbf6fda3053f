"""Commands that say what a cluster would need, and whether it is there."""
