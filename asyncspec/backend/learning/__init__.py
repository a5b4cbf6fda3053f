"""Training a draft head on a node's own answers while it serves, in a process of its own."""
