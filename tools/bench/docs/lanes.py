"""What every device does under several policies, in characters: runs on the virtual clock."""

from __future__ import annotations

from collections.abc import Sequence

from asyncspec.sim.costs import PRESETS
from asyncspec.sim.language import Synthetic, harmonic
from asyncspec.trace.records import FORMAT, Trace, TraceHeader
from asyncspec_nodes.plugins.simulation.cluster import Setting, simulate
from asyncspec_nodes.plugins.simulation.simulate_command import DEFAULT_DECAY, DEFAULT_TOP
from asyncspec_nodes.plugins.viewer.analysis.build import build
from asyncspec_nodes.plugins.viewer.analysis.timeline import Span

POLICIES = {
    "plain pipeline": "autoregressive",
    "one tree a round": "chunked",
    "FlowSpec": "flowspec",
    "flow, the default": "flow",
}
STAGES, TOKENS = 4, 256
FIRST, COLUMNS = 60, 40
"""Turns: the first ones of an answer are left out."""


def reference(argument: str) -> str:
    """Lanes of a few policies, a column a turn."""
    return "```\n" + "\n\n".join(_lanes(*one) for one in POLICIES.items()) + "\n```"


def _lanes(title: str, policy: str) -> str:
    language = Synthetic(harmonic(DEFAULT_TOP), decay=DEFAULT_DECAY)
    # Every pass takes one turn, whatever its rows: the papers' own accounting.
    setting = Setting(language, PRESETS["turns"], STAGES, TOKENS)
    outcome = simulate(setting, policy, record=True)
    spans = build(Trace(TraceHeader(FORMAT, "", ""), outcome.trace)).spans
    passes = [span for span in spans if span.kind == "compute"]
    # Columns begin with a pass of the first stage.
    start = min(span.at for span in passes if span.rank == 1 and span.at >= FIRST)
    rate = outcome.stats[0]["tokens_per_turn"]
    left = (title, f"{rate:.2f} tokens/turn", *[""] * (STAGES - 1))
    drafting = [span for span in spans if span.kind == "draft"]
    lanes = [("draft", lane(drafting, start, "D", 0.0))]
    for rank in range(1, STAGES + 1):
        own = [span for span in passes if span.rank == rank]
        lanes.append((f"V{rank}", lane(own, start, "#", 0.5)))
    lines = zip(left, lanes, strict=True)
    return "\n".join(f"{text:18} {name:6} {marks}" for text, (name, marks) in lines)


def lane(spans: Sequence[Span], start: float, mark: str, least: float) -> str:
    """A character for each turn: the mark where the device was busy for more than ``least``."""
    busy = [0.0] * COLUMNS
    for span in spans:
        for turn in range(COLUMNS):
            at = start + turn
            busy[turn] += max(0.0, min(span.until, at + 1.0) - max(span.at, at))
    return "".join(mark if share > least + 1e-6 else "." for share in busy)
