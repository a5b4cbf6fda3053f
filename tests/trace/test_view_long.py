"""The viewer with long runs, in a real browser: a frame costs what its pixels cost."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from asyncspec.trace.records import NodeRecord, TraceHeader
from asyncspec_nodes.plugins.viewer.analysis.build import build
from asyncspec_nodes.plugins.viewer.analysis.timeline import (
    Instant,
    Round,
    SegmentLifetime,
    Span,
    Timeline,
    Token,
    Visit,
)
from asyncspec_nodes.plugins.viewer.page import page
from asyncspec_protocol.ids import NodeId, SessionId
from asyncspec_protocol.messages import Segment
from browser import CHROMIUM, Browser
from cluster import Cluster, ask
from laws import SMALL, Shaken

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]

STAGES = 8
STEP = 0.004


def long(count: int) -> Timeline:
    """A synthetic run of so many spans: segments that follow each other through eight stages."""
    chance = random.Random(1)
    spans: list[Span] = []
    lifetimes: list[SegmentLifetime] = []
    tokens: list[Token] = []
    instants: list[Instant] = []
    while len(spans) < count:
        number = len(lifetimes)
        sent = number * STEP
        spans.append(Span(0, "draft", sent - STEP, sent, 0, number, rows=16))
        ids = tuple(NodeId(16 * number + i) for i in range(16))
        segment = Segment(SessionId(0), number, 0, ids, ids)
        hops: list[Visit] = []
        for rank in range(1, STAGES + 1):
            came = sent + (rank - 1) * STEP
            at, until = came + STEP / 4, came + STEP * chance.uniform(0.4, 0.9)
            useful = chance.choice((0, 0, 1, 4))
            dead = chance.randrange(12 - useful)
            spans += [
                Span(rank, "queue", came, at, 0, number),
                Span(rank, "compute", at, until, 0, number, 16, useful, dead, 16 * number),
                Span(rank, "step", until, until + 1e-5),
                Span(rank, "transfer", until, came + STEP, 0, number, peer=(rank + 1) % 9),
            ]
            hops.append(
                Visit(rank, came, segment, ids, started=at, ended=until, sent=until, rows_out=16)
            )
        verified = sent + STAGES * STEP
        lifetimes.append(
            SegmentLifetime(0, number, ids, sent, tuple(hops), verified, "verified", 2, 1)
        )
        tokens.append(Token(0, number, 7, verified, number, number % 4 > 0, text=" word"))
        instants += [Instant(rank, verified, "prune", 0) for rank in range(STAGES + 1)]
    end = lifetimes[-1].sent + STAGES * STEP
    cuts = [end * i / 500 for i in range(501)]
    return Timeline(
        TraceHeader(1, "asyncspec", "2026-01-01T00:00:00.000+00:00", "long"),
        end,
        tuple(
            NodeRecord(r, 0, 0, "verify" if r else "draft", 8, (4 * r - 4, 4 * r)) for r in range(9)
        ),
        clocks=(),
        requests=(),
        spans=tuple(sorted(spans, key=lambda span: span.at)),
        lifetimes=tuple(lifetimes),
        tokens=tuple(tokens),
        rounds=tuple(
            Round(0, 0, i, cuts[i], cuts[i + 1], 12, "miss") for i in range(len(cuts) - 1)
        ),
        instants=tuple(instants),
    )


async def test_sums_by_column_are_those_of_the_spans(tmp_path: Path) -> None:
    script = """(() => {
        const {model, lanes, columnsOf} = asyncspecTrace, s = model.spans, bad = [];
        const windows = [[0, 1], [0.1, 0.35], [0.5, 0.502], [-0.2, 1.3]];
        for (const lane of lanes) for (const [low, high] of windows) {
            const from = low * model.duration, to = high * model.duration, row = lane.rows[0];
            const shares = columnsOf(row, from, to, 37);
            const sum = shares.reduce((a, b) => a + b, 0) * (to - from) / 37;
            // A device does one thing at a time, so its spans do not overlap.
            const spent = row.list.reduce((a, i) =>
                a + Math.max(0, Math.min(to, s.until[i]) - Math.max(from, s.at[i])), 0);
            if (Math.abs(sum - spent) > (to - from) * 1e-4) bad.push([lane.name, low, high]);
        }
        return bad;
    })()"""
    cluster = Cluster(Shaken([1, 3, 2]), stages=3, policies=SMALL, record=True)
    cluster.submit(ask())
    cluster.world.run()
    path = tmp_path / "trace.html"
    path.write_text(page(build(cluster.trace())), encoding="utf-8")
    async with Browser() as tab:
        await tab.open(path)
        assert await tab.run(script) == []


WINDOWS = (1.0, 0.5, 0.2, 0.05, 0.01, 0.001)
"""Shares of the run that are in view."""


async def works(tab: Browser, part: float) -> dict[str, int]:
    """What a frame looked at whose window is such a part of the run, in the run's middle."""
    await tab.run(
        "(() => { const T = asyncspecTrace, half = T.model.duration / 2;"
        f"T.show(half - half * {part}, half + half * {part}); T.redraw(); }})()"
    )
    await tab.frame()
    found = await tab.run("asyncspecTrace.work")
    assert isinstance(found, dict)
    return found


async def test_two_hundred_thousand_events(tmp_path: Path) -> None:
    path = tmp_path / "long.html"
    path.write_text(page(long(200_000)), encoding="utf-8")
    async with Browser() as tab:
        await tab.open(path)
        assert await tab.run("asyncspecTrace.model.spans.at.length") >= 200_000
        # Three rows and a strip a device. Counted, not timed: time is the machine's.
        width = await tab.run("document.getElementById('view').clientWidth")
        device = width * await tab.run("asyncspecTrace.lanes.length")
        looked = []
        for part in WINDOWS:
            work = await works(tab, part)
            assert work["spans"] <= 3 * device, part
            assert work["columns"] <= 2 * device, part
            assert work["marks"] <= 2 * device, part
            looked.append(work)
        # Far out nothing is looked at by itself, near by all of it is.
        assert looked[0]["spans"] == 0 < looked[-1]["spans"]
        # However often a new picture is asked for, there is one a frame.
        frames = await tab.run("asyncspecTrace.frames")
        await tab.run("(() => { for (let i = 0; i < 100; i++) asyncspecTrace.redraw(); })()")
        await tab.frame()
        assert frames < await tab.run("asyncspecTrace.frames") <= frames + 2
        # Nothing of the page grows with the events.
        count = "document.querySelectorAll('*:not(#tokens *)').length"
        assert await tab.run(count) < 300
        assert tab.problems == []


async def test_keys_and_clicks_in_a_long_run(tmp_path: Path) -> None:
    path = tmp_path / "long.html"
    path.write_text(page(long(200_000)), encoding="utf-8")
    async with Browser() as tab:
        await tab.open(path)
        whole = await tab.run("asyncspecTrace.state")
        for key in ("+", "ArrowRight", "n", "m", "t"):
            frames = await tab.run("asyncspecTrace.frames")
            await tab.key(key)
            assert await tab.run("asyncspecTrace.frames") > frames, key
        assert await tab.run("asyncspecTrace.state.token") == 0
        await tab.key("Escape")
        await tab.key("0")
        assert await tab.run("asyncspecTrace.state") == whole
        assert tab.problems == []
