"""Packages that are chosen by a name and imported by nothing else: commands and HTTP dialects."""
