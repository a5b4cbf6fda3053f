"""The page's data and its making, without a browser."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.trace.build import build, timeline
from asyncspec.trace.reading import read
from asyncspec.trace.summary import summarise
from asyncspec.trace.timeline import Timeline
from asyncspec.trace.view import page
from asyncspec.trace.view.model import KINDS, model
from asyncspec.trace.view.page import embed
from cluster import Cluster, ask
from laws import SMALL, Shaken


def recorded(policy: str = "flowspec", stages: int = 3) -> Timeline:
    cluster = Cluster(Shaken([1, 3, 2]), stages=stages, policies=SMALL, record=True)
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
    for table in (found.spans, found.journeys, found.tokens, found.rounds, found.marks):
        assert len({len(column) for column in table.values()}) == 1
    starts: list[Any] = list(found.spans["at"])
    assert starts == sorted(starts)
    assert len(found.spans["at"]) > 100
    assert set(found.spans["kind"]) <= set(range(len(KINDS)))
    assert [lane.name for lane in found.lanes] == ["D0", "V1", "V2", "V3"]


def test_the_page_holds_the_model_and_nothing_from_elsewhere() -> None:
    cluster = Cluster(Shaken([1, 3, 2]), stages=2, record=True)
    cluster.submit(ask())
    cluster.world.run()
    reading = read(cluster.trace())
    line = timeline(reading)
    html = page(line, summarise(reading, line))
    found = data_of(html)
    assert found["tokens"] == json.loads(msgspec.json.encode(model(line).tokens))
    assert found["summary"]["bottleneck"]  # type: ignore[index]
    assert not re.search(r"(src|href)\s*=|https?://|@import|url\(", html)
    assert not re.search(r"@(title|style|data|script)@", html)


@given(st.text())
def test_no_text_ends_the_data(text: str) -> None:
    line = recorded("autoregressive", 1)
    token = msgspec.structs.replace(line.tokens[0], text=text + "</script><b>@script@")
    html = page(msgspec.structs.replace(line, tokens=(token,)))
    assert data_of(html)["tokens"]["text"] == [token.text]  # type: ignore[index]


def test_markup_in_data_is_no_markup() -> None:
    assert embed("</script>\u2028") == '"\\u003c/script>\\u2028"'
