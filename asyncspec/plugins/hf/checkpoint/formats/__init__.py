"""Checkpoints that their publishers have quantised: what their files hold, and how it is read."""
