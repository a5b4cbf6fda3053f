"""The parts of the documentation that are made from code and from measured results."""
