"""The next-token layers (MTP) inside a target's checkpoint as a token source. ``layouts`` needs no
torch."""
