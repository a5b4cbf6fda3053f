"""A model without tensors, for tests and the simulator."""
