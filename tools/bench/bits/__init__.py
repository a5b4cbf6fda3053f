"""Whether trees have the bits of sequences on this CPU."""
