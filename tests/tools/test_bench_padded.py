"""Padded clusters of processes next to the simulator."""

from __future__ import annotations

import json

import pytest

from tools.bench import padded
from tools.bench.__main__ import main
from tools.bench.padded import Case

pytestmark = pytest.mark.nightly


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
