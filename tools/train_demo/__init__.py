"""Trains the small models that ship with asyncspec: a target, a draft model and an EAGLE head."""
