"""DiP-SD's planner: who is verified together, in which order, and how long each draft is. Pure."""
