"""Mixes next to the better of their parts: what is compared, and how sure it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench import hybrid
from tools.bench.__main__ import main

pytestmark = pytest.mark.nightly


@pytest.mark.torch
@pytest.mark.parametrize("costs", hybrid.COSTS)
def test_a_small_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str], costs: str) -> None:
    (tmp_path / "one.jsonl").write_text('{"turns": ["def add(a, b):"]}\n')
    words = ["hybrid", "--prompts", str(tmp_path), "--max-new-tokens", "6", "--json"]
    words += ["--costs", costs]
    assert main([*words, "--policies", "chain", "--out", str(tmp_path / "out")]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 2 * 2 * 2, "mixes, temperatures, the set and all of them"
    assert all(set(row["alt"]) == {row["mix"], *hybrid.MIXES[row["mix"]]} for row in rows)
    assert (tmp_path / "out" / "results.jsonl").exists()
