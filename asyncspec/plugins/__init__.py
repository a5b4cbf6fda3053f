"""Packages that are chosen by a name and imported by nothing else: engines and planners."""
