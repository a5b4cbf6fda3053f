"""Mixes next to the better of their parts: what is compared, and how sure it is."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.bench import hybrid
from tools.bench.__main__ import main
from tools.bench.paired import Gain, Pair, compare
from tools.bench.prompts import Prompt

counts = st.integers(1, 500)


@given(st.lists(st.tuples(counts, counts), min_size=1, max_size=8), st.floats(0.25, 4))
def test_a_setting_that_is_faster_everywhere_is_surely_so(pairs: Any, factor: float) -> None:
    found = compare([Pair(factor * t, n, t, n) for t, n in pairs])
    assert found.gain == pytest.approx(factor - 1)
    if len(pairs) == 1:
        assert found.between is None
    else:
        assert found.between == pytest.approx((factor - 1, factor - 1))


@given(st.lists(st.tuples(counts, counts, counts, counts), min_size=2, max_size=8))
def test_the_gain_lies_among_the_single_ones_and_the_interval_is_one(rows: Any) -> None:
    pairs = [Pair(*row) for row in rows]
    found = compare(pairs)
    assert found == compare(pairs)
    assert found.between is not None
    assert found.between[0] <= found.between[1]
    ours = [pair.tokens / pair.turns for pair in pairs]
    theirs = [pair.other_tokens / pair.other_turns for pair in pairs]
    low, high = min(ours) / max(theirs), max(ours) / min(theirs)
    assert low - 1e-9 <= found.gain + 1 <= high + 1e-9


def test_one_prompt_that_gains_and_one_that_loses_are_noise() -> None:
    found = compare([Pair(110, 100, 100, 100), Pair(90, 100, 100, 100)])
    assert found.gain == pytest.approx(0.0)
    assert found.between is not None
    assert found.between[0] < -0.05 < 0.05 < found.between[1]


def options(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(max_new_tokens=8, stages=4, **changes)


def test_a_mix_is_compared_with_the_better_part_of_each_set() -> None:
    sets: dict[str, tuple[Prompt, ...]] = {
        name: (Prompt(name, 0, "a"), Prompt(name, 1, "b")) for name in ("code", "prose")
    }
    turns = {"draft": (10, 5), "ngram": (5, 10), "hybrid": (5, 4)}

    def result(cell: Any) -> dict[str, float]:
        place = cell.ask.prompt.set == "prose"
        return {"new_tokens": 11, "turns": turns[cell.setting.source][place]}

    code, prose, both = hybrid.compared(options(), "flowspec", 0.0, "hybrid", sets, result)
    assert (code.set, code.better, code.gain) == ("code", "ngram", Gain(0.0, (0.0, 0.0)))
    assert prose.better == "draft"
    assert prose.gain.gain == pytest.approx(0.25)
    assert (both.set, both.better) == ("all", "draft")
    assert both.alt == {"hybrid": 20 / 9 * 0.5 * 2, "draft": 20 / 15 * 1.0, "ngram": 20 / 15 * 1.0}
    lines = hybrid.table([code, prose, both])
    assert lines[2] == "| policy | code | prose | all |"
    assert lines[4].startswith("| `flowspec` | +0.0 (+0..+0) | +25.0 (+25..+25) |")


@pytest.mark.torch
def test_a_small_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.jsonl").write_text('{"turns": ["def add(a, b):"]}\n')
    words = ["hybrid", "--prompts", str(tmp_path), "--max-new-tokens", "6", "--json"]
    assert main([*words, "--policies", "chain", "--out", str(tmp_path / "out")]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 2 * 2 * 2, "mixes, temperatures, the set and all of them"
    assert all(set(row["alt"]) == {row["mix"], *hybrid.MIXES[row["mix"]]} for row in rows)
    assert (tmp_path / "out" / "results.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hybrid", "--policies", "nosuch"], "unknown policy"),
        (["hybrid", "--policies", "autoregressive"], "needs no token source"),
        (["hybrid", "--per-file", "0"], "it must be at least 1"),
        (["hybrid", "--out", "pyproject.toml/x"], "cannot write pyproject.toml/x"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.jsonl").write_text('{"turns": ["x"]}\n')
    assert main([words[0], "--prompts", str(tmp_path), *words[1:]]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
