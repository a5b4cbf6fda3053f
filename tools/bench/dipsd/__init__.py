"""``python tools/bench dipsd``: DiP-SD's figures, planners against brute force, unsteady machines."""
