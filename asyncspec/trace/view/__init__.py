"""The trace viewer: a timeline as one HTML file that needs no network."""

from asyncspec.trace.view.page import page

__all__ = ["page"]
