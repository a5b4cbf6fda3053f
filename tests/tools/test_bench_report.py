"""``bench report``: keys, resuming, and tables from cells made by hand. No models."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from tools.bench.prompts import Prompt
from tools.bench.report.cell import Ask, Cell, Setting, Stats
from tools.bench.report.plan import Identity, Plan
from tools.bench.report.store import Store

pytestmark = pytest.mark.nightly

SETS = {name: tuple(Prompt(name, i, f"{name} {i}") for i in range(3)) for name in ("code", "story")}
CELL = Cell(Ask(SETS["code"][0]), Setting("flowspec", "draft"))
IDENTITY = Identity("code", {"target": "t", "draft": "d", "eagle": "e"}, "machine")


def test_only_what_is_missing_is_measured(tmp_path: Path) -> None:
    wanted = [replace(CELL, setting=replace(CELL.setting, stages=n)) for n in (1, 2, 2, 3)]
    store = Store(tmp_path / "results.jsonl")
    plan = Plan(wanted, IDENTITY, store, "commit")
    assert len(plan.cells) == len(plan.missing()) == 3
    store.add(IDENTITY.of(wanted[1]), stats(9, 4))
    assert list(plan.missing().values()) == [wanted[0], wanted[3]]
    assert plan.result(wanted[2]) == stats(9, 4)
    store.close()


def stats(tokens: int, turns: int, rounds: int = 2) -> Stats:
    return {
        "new_tokens": tokens,
        "turns": turns,
        "rounds": rounds,
        "decode_seconds": turns / 2,
        "hits": tokens - 1 - rounds,
        "misses": rounds,
    }
