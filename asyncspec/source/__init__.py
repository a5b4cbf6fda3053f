"""Token sources without tensors, and how all of them grow a tree."""
