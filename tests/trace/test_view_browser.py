"""The viewer in a real browser: clicks, keys, the wheel, and two hundred thousand events."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from asyncspec.trace.build import timeline
from asyncspec.trace.reading import read
from asyncspec.trace.records import Header, Node
from asyncspec.trace.summary import summarise
from asyncspec.trace.timeline import Span, Timeline
from asyncspec.trace.view import page
from browser import CHROMIUM, Browser
from cluster import Cluster, ask
from laws import SMALL, Shaken

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]

STATE = "({journey: asyncspecTrace.chosen.journey, token: asyncspecTrace.chosen.token})"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    cluster = Cluster(Shaken([1, 3, 2]), stages=3, policies=SMALL, record=True)
    for number in range(2):
        cluster.submit(ask(number, prompt=(1, 2, 3 + number)))
    cluster.world.run()
    reading = read(cluster.trace())
    line = timeline(reading)
    path = tmp_path / "trace.html"
    path.write_text(page(line, summarise(reading, line)), encoding="utf-8")
    return path


async def place_of(tab: Browser, selector: str) -> tuple[float, float]:
    box = await tab.run(
        f"(() => {{ const b = document.querySelector('{selector}').getBoundingClientRect();"
        "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
    )
    return box[0], box[1]


async def place_of_pass(tab: Browser) -> tuple[float, float, int]:
    """The middle of the longest pass that brought a token, and its journey."""
    found = await tab.run(
        """(() => {
            const {model, toX, rowTop, rowHeight} = asyncspecTrace, s = model.spans;
            const passes = s.at.map((_, i) => i).filter((i) =>
                s.kind[i] === 0 && model.journeys.brought[s.journey[i]] > 0);
            const i = passes.sort((a, b) => (s.until[b] - s.at[b]) - (s.until[a] - s.at[a]))[0];
            const box = document.getElementById("view").getBoundingClientRect();
            const x = toX((s.at[i] + s.until[i]) / 2);
            const y = rowTop(s.lane[i], 0) + rowHeight(0) / 2;
            return [box.x + x, box.y + y, s.journey[i]];
        })()"""
    )
    return found[0], found[1], found[2]


async def test_clicks(file: Path) -> None:
    async with Browser() as tab:
        await tab.open(file)
        before = await tab.screenshot()
        await tab.click(*await place_of(tab, "#token-5"))
        state = await tab.run(STATE)
        assert state["token"] == 5
        assert state["journey"] == await tab.run("asyncspecTrace.model.tokens.journey[5]")
        assert await tab.screenshot() != before, "its path is lit"
        assert "Segment" in await tab.run("document.getElementById('selected').textContent")
        await tab.click(*await place_of(tab, "#fit"))
        x, y, journey = await place_of_pass(tab)
        await tab.click(x, y)
        state = await tab.run(STATE)
        assert state["journey"] == journey
        assert await tab.run("document.querySelectorAll('#tokens .same').length") > 0
        assert tab.problems == []


async def test_hovering_tells_the_details(file: Path) -> None:
    async with Browser() as tab:
        await tab.open(file)
        x, y, _ = await place_of_pass(tab)
        await tab.point(x, y)
        text = await tab.run("document.getElementById('tip').textContent")
        assert "computes segment" in text
        assert "useful" in text
        assert "nodes" in text
        assert tab.problems == []


async def test_keys_alone(file: Path) -> None:
    async with Browser() as tab:
        await tab.open(file)
        window = "asyncspecTrace.scale.to - asyncspecTrace.scale.from"
        whole = await tab.run(window)
        await tab.key("+")
        assert await tab.run(window) == pytest.approx(whole / 2)
        start = await tab.run("asyncspecTrace.scale.from")
        await tab.key("ArrowRight")
        assert await tab.run("asyncspecTrace.scale.from") > start
        await tab.key("0")
        assert await tab.run(window) == pytest.approx(whole)
        await tab.key("n")
        first = (await tab.run(STATE))["journey"]
        await tab.key("n")
        assert (await tab.run(STATE))["journey"] == first + 1
        await tab.key("p")
        assert (await tab.run(STATE))["journey"] == first
        await tab.key("Escape")
        assert await tab.run(STATE) == {"journey": -1, "token": -1}
        await tab.key("t")
        await tab.key("t")
        assert (await tab.run(STATE))["token"] == 1
        # The strip of tokens is reached by Tab and walked by arrows.
        await tab.run("document.getElementById('tokens').focus()")
        await tab.key("ArrowRight")
        assert (await tab.run(STATE))["token"] == 2
        await tab.key("?")
        assert await tab.run("document.getElementById('keys').hidden") is False
        reached = []
        await tab.run("document.activeElement.blur()")
        for _ in range(8):
            await tab.key("Tab")
            reached.append(await tab.run("document.activeElement.id"))
        assert {"tokens", "out", "in", "fit", "help", "view"} <= set(reached)
        assert tab.problems == []


async def test_the_wheel_zooms_at_the_cursor(file: Path) -> None:
    async with Browser() as tab:
        await tab.open(file)
        x, y, _ = await place_of_pass(tab)
        box = "document.getElementById('view').getBoundingClientRect().x"
        script = f"asyncspecTrace.toTime({x} - {box})"
        under = await tab.run(script)
        window = "asyncspecTrace.scale.to - asyncspecTrace.scale.from"
        whole = await tab.run(window)
        await tab.wheel(x, y, -100)
        assert await tab.run(window) < whole
        assert await tab.run(script) == pytest.approx(under, abs=whole / 1000)
        assert tab.problems == []


async def test_a_link_to_a_token(file: Path) -> None:
    async with Browser() as tab:
        await tab.open(file, then="#token-7")
        assert (await tab.run(STATE))["token"] == 7
        assert tab.problems == []


def long(count: int) -> Timeline:
    """A synthetic run of so many spans on a draft node and eight stages."""
    nodes = tuple(Node(r, 0, 0, "verify" if r else "draft", 8, (r, r + 1)) for r in range(9))
    spans = []
    for i in range(count):
        at = (i // 9) * 0.004 + (i % 9) * 0.0001
        kind = "compute" if i % 9 else "draft"
        spans.append(
            Span(i % 9, kind, at, at + 0.003, 0, i // 9, rows=16, useful=2, dead=i % 7, first=i)
        )
    header = Header(1, "asyncspec", "2026-01-01T00:00:00.000+00:00", "long")
    line = Timeline(header, spans[-1].until, nodes, (), (), (), (), (), (), ())
    return msgspec.structs.replace(line, spans=tuple(spans))


async def test_two_hundred_thousand_events(tmp_path: Path) -> None:
    path = tmp_path / "long.html"
    path.write_text(page(long(200_000)), encoding="utf-8")
    async with Browser() as tab:
        await tab.open(path)
        assert await tab.run("asyncspecTrace.model.spans.at.length") == 200_000
        frames = await tab.run("asyncspecTrace.painted.frames")
        for key in ("+", "ArrowRight", "-", "0"):
            await tab.key(key)
        assert await tab.run("asyncspecTrace.painted.frames") >= frames + 4
        # Nothing of the page grows with the events.
        assert await tab.run("document.querySelectorAll('*').length") < 300
        assert tab.problems == []
