"""The sequential decoder in a process of its own, to compare with."""
