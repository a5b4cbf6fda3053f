"""One node of a cluster as a process."""
