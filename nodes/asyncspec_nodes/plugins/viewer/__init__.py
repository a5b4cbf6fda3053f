"""The trace viewer: a timeline as one HTML file."""
