"""The page: template, style, scripts and data in one file."""

from __future__ import annotations

from importlib import resources

import msgspec

from asyncspec.trace.analysis.timeline import Timeline
from asyncspec.trace.view.model import Model, model

SCRIPTS = (
    "rows.js",
    "data.js",
    "scale.js",
    "pixels.js",
    "ink.js",
    "lanes.js",
    "paint.js",
    "marks.js",
    "rounds.js",
    "path.js",
    "map.js",
    "tips.js",
    "panel.js",
    "summary.js",
    "tokens.js",
    "choose.js",
    "input.js",
    "main.js",
)
"""In the order in which they build on each other."""


def page(timeline: Timeline, summary: object = None) -> str:
    """The viewer for a timeline, as HTML. ``summary`` may be left out."""
    return render(model(timeline, summary))


def render(data: Model) -> str:
    """The page for a model."""
    scripts = "\n".join(_asset(script) for script in SCRIPTS)
    parts = {
        "@title@": _text(f"{data.title} - asyncspec trace"),
        "@style@": _asset("page.css"),
        "@data@": embed(data),
        "@script@": f'(() => {{\n"use strict";\n{scripts}\n}})();',
    }
    # One after another, each once: nothing that was put in is searched.
    rest, out = _asset("page.html"), []
    for marker, content in parts.items():
        before, _, rest = rest.partition(marker)
        out += [before, content]
    return "".join([*out, rest])


def embed(data: object) -> str:
    """JSON that ends no script element, whatever text is in it."""
    text = msgspec.json.encode(data).decode()
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _text(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")
