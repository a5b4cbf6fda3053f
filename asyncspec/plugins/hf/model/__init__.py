"""A verify stage: weights, layers, self-test and memory."""
