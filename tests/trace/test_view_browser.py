"""The viewer in a real browser: clicks, keys, the wheel, links, what stands in the panels."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from asyncspec_nodes.plugins.viewer.analysis.build import build
from asyncspec_nodes.plugins.viewer.analysis.summary import summarise
from asyncspec_nodes.plugins.viewer.analysis.timeline import Timeline
from asyncspec_nodes.plugins.viewer.page import page
from browser import CHROMIUM, Browser
from cluster import Cluster, ask
from laws import SMALL, Shaken

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]

STATE = "({lifetime: asyncspecTrace.state.lifetime, token: asyncspecTrace.state.token})"
VIEW = "document.getElementById('view').getBoundingClientRect()"
SELECTED = "document.getElementById('selected').textContent"
VISIBLE = "document.querySelector('#legend li').checkVisibility()"
TIP = "document.getElementById('tip').textContent"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    cluster = Cluster(Shaken([1, 3, 2]), stages=3, policies=SMALL, record=True)
    for number in range(2):
        cluster.submit(ask(number, prompt=(1, 2, 3 + number)))
    cluster.world.run()
    line = build(cluster.trace())
    path = tmp_path / "trace.html"
    path.write_text(page(line, summarise(line)), encoding="utf-8")
    return path


def recorded() -> Timeline:
    cluster = Cluster(Shaken([1, 3, 2]), stages=2, policies=SMALL, record=True)
    cluster.submit(ask())
    cluster.world.run()
    return build(cluster.trace())


async def place_of(tab: Browser, selector: str) -> tuple[float, float]:
    box = await tab.run(
        f"(() => {{ const b = document.querySelector('{selector}').getBoundingClientRect();"
        "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
    )
    return box[0], box[1]


async def place_of_pass(tab: Browser) -> tuple[float, float, int]:
    """The middle of the longest pass that brought a token, and its lifetime."""
    found = await tab.run(
        """(() => {
            const {model, toX, rowTop, rowHeight} = asyncspecTrace, s = model.spans;
            const passes = s.at.map((_, i) => i).filter((i) =>
                s.kind[i] === 0 && model.lifetimes.emitted[s.lifetime[i]] > 0);
            const i = passes.sort((a, b) => (s.until[b] - s.at[b]) - (s.until[a] - s.at[a]))[0];
            const box = document.getElementById("view").getBoundingClientRect();
            const x = toX((s.at[i] + s.until[i]) / 2);
            const y = rowTop(s.lane[i], 0) + rowHeight(0) / 2;
            return [box.x + x, box.y + y, s.lifetime[i]];
        })()"""
    )
    return found[0], found[1], found[2]


async def test_clicks(file: Path, tmp_path: Path) -> None:
    async with Browser() as tab:
        await tab.open(file)
        before = await tab.screenshot()
        (tmp_path / "trace.png").write_bytes(before)
        await tab.click(*await place_of(tab, "#token-5"))
        state = await tab.run(STATE)
        assert state["token"] == 5
        assert state["lifetime"] == await tab.run("asyncspecTrace.model.tokens.lifetime[5]")
        assert await tab.screenshot() != before, "its path is lit"
        assert "Segment" in await tab.run(SELECTED)
        stages = await tab.run("document.querySelectorAll('#selected tbody tr').length")
        assert stages == await tab.run(
            f"asyncspecTrace.model.lifetimes.hops[{state['lifetime']}].length"
        )
        await tab.click(*await place_of(tab, "#fit"))
        x, y, lifetime = await place_of_pass(tab)
        await tab.click(x, y)
        state = await tab.run(STATE)
        assert state["lifetime"] == lifetime
        assert await tab.run("document.querySelectorAll('#tokens .same').length") > 0
        assert tab.problems == []


async def test_hovering_tells_the_details(file: Path) -> None:
    async with Browser() as tab:
        await tab.open(file)
        x, y, _ = await place_of_pass(tab)
        await tab.point(x, y)
        text = await tab.run(TIP)
        assert "computes segment" in text
        assert "useful" in text
        assert "nodes" in text
        # A moment, and a round.
        box = await tab.run(
            f"(() => {{ const {{model, toX, markTop}} = asyncspecTrace, box = {VIEW};"
            "const i = model.marks.kind.indexOf('prune');"
            "const y = markTop(model.marks.lane[i]) + 2;"
            "return [box.x + toX(model.marks.at[i]), box.y + y]; })()"
        )
        await tab.point(*box)
        assert "prune, " in await tab.run(TIP)
        box = await tab.run(
            f"(() => {{ const {{model, toX}} = asyncspecTrace, box = {VIEW};"
            "const middle = (model.rounds.at[0] + model.rounds.until[0]) / 2;"
            "return [box.x + toX(middle), box.y + 8]; })()"
        )
        # The row at the top is of the request that began first.
        request = await tab.run("asyncspecTrace.model.rounds.request[0]")
        await tab.point(*box)
        assert f"round 1 of request {request}" in await tab.run(TIP)
        await tab.click(*box)
        assert f"round 1 of request {request}" in await tab.run(SELECTED)
        assert await tab.run("asyncspecTrace.state.round") == 0
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
        first = (await tab.run(STATE))["lifetime"]
        await tab.key("n")
        assert (await tab.run(STATE))["lifetime"] == first + 1
        await tab.key("p")
        assert (await tab.run(STATE))["lifetime"] == first
        await tab.key("Escape")
        assert await tab.run(STATE) == {"lifetime": -1, "token": -1}
        await tab.key("t")
        await tab.key("t")
        assert (await tab.run(STATE))["token"] == 1
        await tab.key("0")
        for number in range(2):
            await tab.key("m")
            ends = await tab.run("asyncspecTrace.model.rounds.end[asyncspecTrace.state.round]")
            assert ends == "miss"
            assert "ended by a miss" in await tab.run(SELECTED), number
        await tab.run("asyncspecTrace.select({token: 1})")
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


async def test_over_the_names_the_wheel_scrolls(file: Path) -> None:
    async with Browser() as tab:
        await tab.open(file)
        _, y, _ = await place_of_pass(tab)
        before = await tab.run("asyncspecTrace.state")
        await tab.wheel(await tab.run(f"{VIEW}.x") + 20, y, -100)
        assert await tab.run("asyncspecTrace.state") == before
        assert tab.problems == []


async def test_the_view_starts_with_three_colours(file: Path) -> None:
    """The other ten unfold."""
    async with Browser() as tab:
        await tab.open(file)
        assert await tab.run("document.querySelectorAll('#lead canvas').length") == 3
        assert not await tab.run(VISIBLE)
        await tab.run("document.querySelector('#terms summary').click()")
        await tab.frame()
        assert await tab.run(VISIBLE)
        assert await tab.run("document.querySelectorAll('#legend li').length") == 10
        assert tab.problems == []


async def test_links(file: Path) -> None:
    async with Browser() as tab:
        await tab.open(file, then="#token=7")
        assert (await tab.run(STATE))["token"] == 7
        assert await tab.run("scrollY") == 0
        # A link that is pasted into the open page.
        await tab.run("new Promise(r => { onhashchange = r; location.hash = '#segment=2'; })")
        assert (await tab.run(STATE))["lifetime"] == 2
        await tab.run("asyncspecTrace.select({lifetime: 3})")
        assert await tab.run("location.hash") == "#segment=3"
        assert tab.problems == []


async def test_a_pruned_segment_says_where_it_ended(file: Path) -> None:
    async with Browser() as tab:
        await tab.open(file)
        pruned = await tab.run("asyncspecTrace.model.lifetimes.outcome.indexOf('pruned')")
        assert pruned >= 0
        await tab.run(f"asyncspecTrace.select({{lifetime: {pruned}}})")
        assert "pruned on the way, last seen at V" in await tab.run(SELECTED)
        assert tab.problems == []


async def test_light_and_dark(file: Path) -> None:
    async with Browser() as tab:
        seen = []
        for scheme in ("light", "dark"):
            preferred = [{"name": "prefers-color-scheme", "value": scheme}]
            await tab.call("Emulation.setEmulatedMedia", features=preferred)
            if scheme == "light":
                await tab.open(file)
                await tab.run("asyncspecTrace.select({token: 5})")
            await tab.frame()
            await tab.frame()
            for selector in ("body", ".meter .drafting", "#tokens [aria-selected=true]"):
                style = f"getComputedStyle(document.querySelector('{selector}'))"
                colours = await tab.run(f"[{style}.color, {style}.backgroundColor]")
                assert colours[0] != colours[1], selector
                seen.append((selector, colours[1]))
        # All of them follow the scheme, also those that were made in the other one.
        assert len(set(seen)) == len(seen)
        assert tab.problems == []


COLOURS = """(i) => {
    const {model, toX, rowTop, rowHeight} = asyncspecTrace, s = model.spans;
    const view = document.getElementById("view"), ratio = view.width / view.clientWidth;
    const copy = document.createElement("canvas");
    copy.width = view.width; copy.height = view.height;
    const g = copy.getContext("2d", {willReadFrequently: true});
    g.drawImage(view, 0, 0);
    // The right half: the left bears a number. What lies over its middle may be the way.
    const from = toX((s.at[i] + s.until[i]) / 2), to = toX(s.until[i]) - 6, found = new Set();
    const box = [from, rowTop(s.lane[i], 0) + 1, to - from, rowHeight(0) / 2 - 4];
    const {data} = g.getImageData(...box.map((part) => Math.round(part * ratio)));
    for (let at = 0; at < data.length; at += 4) found.add(data.slice(at, at + 3).join());
    return [...found].sort();
}"""
"""The colours of a pass."""


async def colours_of(tab: Browser, span: int) -> list[str]:
    found = await tab.run(f"({COLOURS})({span})")
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("ratio", [1, 1.5, 2])
@pytest.mark.parametrize(
    ("kind", "colours"), [("useful", 1), ("wrong", 2), ("dead", 2), ("unknown", 2)]
)
async def test_wasted_work_is_textured(
    tmp_path: Path, kind: str, colours: int, ratio: float
) -> None:
    line = recorded()
    number, one = next((i, s) for i, s in enumerate(line.spans) if s.kind == "compute" and s.rows)
    # Of one kind throughout, and with nothing that crosses it.
    fates = {"useful": (one.rows, 0), "wrong": (0, 0), "dead": (0, one.rows), "unknown": (-1, 0)}
    of = fates[kind]
    spans = list(line.spans)
    spans[number] = replace(one, useful=of[0], dead=of[1])
    path = tmp_path / "trace.html"
    path.write_text(
        page(replace(line, spans=tuple(spans), instants=(), rounds=())), encoding="utf-8"
    )
    async with Browser() as tab:
        size = {"width": 1200, "height": 900, "mobile": False}
        await tab.call("Emulation.setDeviceMetricsOverride", deviceScaleFactor=ratio, **size)
        await tab.open(path)
        await tab.run(f"asyncspecTrace.show({one.at * 1e6 - 1e5}, {one.until * 1e6 + 1e5})")
        await tab.run("asyncspecTrace.redraw()")
        await tab.frame()
        # Sharp whatever the screen: no colour between the two.
        assert len(await colours_of(tab, number)) == colours
        assert tab.problems == []


async def test_the_chosen_way_is_lit(file: Path) -> None:
    async with Browser() as tab:
        await tab.open(file)
        passes = await tab.run(
            "(() => { const s = asyncspecTrace.model.spans;"
            "return s.at.map((_, i) => i).filter((i) => s.kind[i] === 0 && s.lifetime[i] >= 0)"
            ".map((i) => [i, s.lifetime[i], s.at[i], s.until[i]]); })()"
        )
        # Two passes of different segments, next to each other.
        (one, lifetime, at, _), (other, _, _, until) = next(
            (a, b) for a, b in pairwise(passes) if a[1] != b[1]
        )
        look = f"(asyncspecTrace.show({at - 1e5}, {until + 1e5}), asyncspecTrace.redraw())"
        await tab.run(look)
        await tab.frame()
        before = await colours_of(tab, one), await colours_of(tab, other)
        await tab.run(f"asyncspecTrace.select({{lifetime: {lifetime}}})")
        await tab.run(look)
        await tab.frame()
        assert await colours_of(tab, one) == before[0]
        assert await colours_of(tab, other) != before[1]
        assert tab.problems == []


async def test_text_without_tokens_of_its_own_and_lost_lines(tmp_path: Path) -> None:
    line = recorded()
    hostile = "<b id=bad></script>\u2028"
    first, second, *rest = line.tokens
    tokens = (replace(first, text=hostile), replace(second, text=""), *rest)
    path = tmp_path / "trace.html"
    path.write_text(page(replace(line, tokens=tokens, dropped=((1, 3),))), encoding="utf-8")
    async with Browser() as tab:
        await tab.open(path)
        assert await tab.run("document.getElementById('token-0').textContent") == hostile
        assert await tab.run("document.getElementById('bad')") is None
        await tab.click(*await place_of(tab, "#token-1"))
        assert (await tab.run(STATE))["token"] == 1
        assert "V1: 3 lines" in await tab.run("document.getElementById('warnings').innerText")
        # Nobody summed up: its sections are not there.
        hidden = "['summary', 'time'].map((id) => document.getElementById(id).hidden)"
        assert await tab.run(hidden) == [True, True]
        assert tab.problems == []
