"""The page: template, style, scripts and data in one file."""

from __future__ import annotations

from html import escape
from importlib import resources

import msgspec

from asyncspec.trace.analysis.timeline import Timeline
from asyncspec.trace.view.model import model

SCRIPTS = [
    f"{name}.js"
    for name in (
        *("rows", "data", "scale", "pixels", "ink", "lanes", "paint", "marks", "rounds", "path"),
        *("map", "tips", "panel", "summary", "tokens", "choose", "input", "main"),
    )
]
"""In the order in which they build on each other."""


def page(timeline: Timeline, summary: object = None) -> str:
    """The viewer for a timeline, as HTML. ``summary`` may be left out."""
    data = model(timeline, summary)
    scripts = "\n".join(map(_asset, SCRIPTS))
    parts = {
        "@title@": escape(f"{data.title} - asyncspec trace", quote=False),
        "@style@": _asset("page.css"),
        "@data@": embed(data),
        "@script@": f'(() => {{\n"use strict";\n{scripts}\n}})();',
    }
    # One after another, each once: inserted content is not searched for markers.
    rest, out = _asset("page.html"), ""
    for marker, content in parts.items():
        before, _, rest = rest.partition(marker)
        out += before + content
    return out + rest


def embed(data: object) -> str:
    """JSON that ends no script element, whatever text is in it."""
    text = msgspec.json.encode(data).decode()
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")
