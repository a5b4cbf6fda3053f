"""The page's data and its making, without a browser."""

from __future__ import annotations

import json
import re
from importlib import resources
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec_nodes.plugins.viewer.analysis.build import build
from asyncspec_nodes.plugins.viewer.analysis.perfetto import export
from asyncspec_nodes.plugins.viewer.analysis.summary import summarise
from asyncspec_nodes.plugins.viewer.analysis.timeline import Timeline
from asyncspec_nodes.plugins.viewer.page import KINDS, SCRIPTS, embed, model, page
from asyncspec_protocol.ids import draft_rank
from cluster import Cluster, ask
from laws import SMALL, Shaken


def recorded(policy: str = "flowspec", stages: int = 3, *, apart: bool = False) -> Timeline:
    cluster = Cluster(Shaken([1, 3, 2]), stages=stages, policies=SMALL, record=True, apart=apart)
    cluster.submit(ask(policy=policy))
    cluster.world.run()
    return build(cluster.trace())


def data_of(html: str) -> dict[str, object]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


def test_columns_have_one_length() -> None:
    found = model(recorded())
    for table in (found.spans, found.lifetimes, found.tokens, found.rounds, found.marks):
        assert len({len(column) for column in table.values()}) == 1
    starts = [at for at in found.spans["at"] if isinstance(at, int)]
    assert starts == sorted(starts)
    assert len(found.spans["at"]) == len(starts) > 100
    assert set(found.spans["kind"]) <= set(range(len(KINDS)))
    assert [lane.name for lane in found.lanes] == ["D0", "V1", "V2", "V3"]


def test_a_token_source_on_its_own_node_is_called_so() -> None:
    line = recorded(stages=2, apart=True)
    found = model(replace(line, dropped=((3, 1),)))
    assert [lane.name for lane in found.lanes] == ["D0", "V1", "V2", "source"]
    assert found.lanes[3].detail == "token source"
    (warning,) = found.warnings
    assert warning.startswith("source: 1 lines")
    titles = re.findall(rb'"args":\{"name":"(D0|V\d|source)', export(line))
    assert titles == [b"D0", b"V1", b"V2", b"source"]


@pytest.mark.parametrize("asked", [0, 1])
def test_a_trace_of_one_of_several_draft_nodes(asked: int) -> None:
    """Its own lines and the stages', which speak of the others' sessions too."""
    cluster = Cluster(Shaken([1, 2]), stages=2, drafts=2, policies=SMALL, record=True)
    for number in range(2):
        cluster.submit(ask(number), draft_rank(number))
    cluster.world.run()
    trace = cluster.trace()
    mine = tuple(line for line in trace.lines if line.rank in (draft_rank(asked), 1, 2))
    line = build(replace(trace, lines=mine))
    assert [request.request for request in line.requests] == [asked]
    assert len(line.tokens) == len(cluster.world.tokens[asked])
    found = model(line, summarise(line))
    names = dict(enumerate(lane.name for lane in found.lanes))
    assert sorted(names.values()) == [f"D{asked}", "V1", "V2"]
    spans: Any = found.spans
    ways = {
        (names[lane], peer)
        for kind, lane, peer in zip(spans["kind"], spans["lane"], spans["peer"], strict=True)
        if kind == KINDS.index("transfer")
    }
    assert ways == {(f"D{asked}", "V1"), ("V1", "V2"), ("V2", f"D{asked}")}
    marks: Any = found.marks
    marked = zip(marks["kind"], marks["lane"], strict=True)
    misses = [names[lane] for kind, lane in marked if kind == "miss"]
    assert misses == [f"D{asked}"] * sum(one.end == "miss" for one in line.rounds)
    assert misses


def test_the_page_gets_segments_and_losses() -> None:
    line = replace(recorded(), dropped=((2, 5),))
    found = model(line)
    for lifetime, hops in zip(line.lifetimes, found.lifetimes["hops"], strict=True):
        assert isinstance(hops, list)
        assert [hop[0] for hop in hops] == [hop.rank for hop in lifetime.hops]
        assert [hop[5:] for hop in hops] == [
            [len(h.message.ids), len(h.ids), h.rows_out] for h in lifetime.hops
        ]
        for hop, seen in zip(lifetime.hops, hops, strict=True):
            moments = (hop.received, hop.started, hop.ended, hop.sent)
            assert seen[1:5] == [-1 if t is None else round(t * 1e6) for t in moments]
    (warning,) = found.warnings
    assert warning.startswith("V2: 5 lines")
    assert model(recorded()).warnings == []


@pytest.mark.parametrize(
    ("layers", "detail"),
    [((0, 4), "layers 0-3"), ((4, 5), "layer 4"), ((0, 0), "verify stage")],
)
def test_names_of_lanes(layers: tuple[int, int], detail: str) -> None:
    line = recorded(stages=1)
    nodes = tuple(replace(node, layers=layers) for node in line.nodes)
    lanes = model(replace(line, nodes=nodes)).lanes
    assert [(lane.name, lane.detail) for lane in lanes] == [("D0", "draft node"), ("V1", detail)]


def test_every_script_is_in_the_page() -> None:
    folder = resources.files("asyncspec_nodes.plugins.viewer") / "assets"
    assert {f.name for f in folder.iterdir() if f.name.endswith(".js")} == set(SCRIPTS)
    html = page(recorded())
    for name in (*SCRIPTS, "page.css"):
        assert (folder / name).read_text(encoding="utf-8") in html


def test_the_page_holds_the_model_and_nothing_from_elsewhere() -> None:
    cluster = Cluster(Shaken([1, 3, 2]), stages=2, record=True)
    cluster.submit(ask())
    cluster.world.run()
    line = build(cluster.trace())
    html = page(line, summarise(line))
    found = data_of(html)
    assert found["tokens"] == json.loads(msgspec.json.encode(model(line).tokens))
    assert found["summary"]["bottleneck"]  # type: ignore[index]
    assert not re.search(r"(src|href)\s*=|https?://|@import|url\(", html)
    assert not re.search(r"@(title|style|data|script)@", html)


@pytest.mark.slow
@given(st.text())
def test_no_text_ends_the_data(text: str) -> None:
    line = recorded("autoregressive", 1)
    token = replace(line.tokens[0], text=text + "</script><b>@script@")
    html = page(replace(line, tokens=(token,)))
    assert data_of(html)["tokens"]["text"] == [token.text]  # type: ignore[index]


def test_markup_in_data_is_no_markup() -> None:
    assert embed("</script>\u2028") == '"\\u003c/script>\\u2028"'
