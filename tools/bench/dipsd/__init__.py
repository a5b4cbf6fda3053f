"""``python tools/bench dipsd``: DiP-SD's figures, planner quality, unsteady machines."""
