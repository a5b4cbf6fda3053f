"""DiP-SD's planner: batches, their order, and draft lengths. Pure."""
