"""Padded clusters of processes next to the simulator."""

from __future__ import annotations

import json

import pytest

from tools.bench import padded
from tools.bench.__main__ import main
from tools.bench.padded import CASES, Case, Row


def test_ratios_are_to_plain_pipelining() -> None:
    assert padded.over_plain({"autoregressive": 2.0, "flow": 5.0}) == {"flow": 2.5}


@pytest.mark.parametrize(
    ("measured", "same"),
    [
        ({"a": 2.0, "b": 3.0, "c": 3.1}, True),
        # Too near for the simulator to say which is faster.
        ({"a": 2.0, "b": 3.1, "c": 3.0}, True),
        ({"a": 3.0, "b": 2.0, "c": 3.1}, False),
    ],
)
def test_only_policies_that_differ_have_an_order(measured: dict[str, float], same: bool) -> None:
    assert Row(CASES[0], {"a": 1.0, "b": 2.0, "c": 2.1}, measured).same_order == same


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.torch
def test_both_ways_say_how_many_times_as_fast(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(padded, "CASES", (Case("one", 2, "useless", pass_seconds=0.004),))
    monkeypatch.setattr(padded, "TOKENS", {"autoregressive": 4, "flow": 8})
    assert main(["padded", "--json"]) == 0
    ((row,),) = (json.loads(capsys.readouterr().out),)
    assert 0 < row["flow, simulated"] <= 1.1
    assert row["flow, measured"] > 0
