"""The command ``asyncspec``: a file or a few for each of its verbs."""
