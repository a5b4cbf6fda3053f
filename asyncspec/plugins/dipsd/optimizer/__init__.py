"""The optimum: batches, their order and draft lengths; its bounds and its baselines. Pure."""
