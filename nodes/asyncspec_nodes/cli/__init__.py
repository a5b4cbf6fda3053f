"""The command ``asyncspec``: a module for each of its verbs. What they print is in ``terminal``."""
