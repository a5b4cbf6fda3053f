"""The measurements of growth measure what they say; how fast is not asked here."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.jobs import Compact, Forward
from asyncspec.core.machine import Compute, Emit, Send
from asyncspec_protocol.messages import PruneIndices, Segment, Verdict
from tools.bench.__main__ import main
from tools.bench.growth import command, context, live_nodes, page, stages, trees
from tools.bench.growth.curve import Curve, slope
from tools.bench.growth.draft_steps import DraftSteps
from tools.bench.growth.model import MODES
from tools.bench.growth.stage_steps import ROWS, stage_steps
from tools.bench.growth.timing import Call, medians

SIZES = st.lists(st.integers(1, 10**6), min_size=2, max_size=8, unique=True)
FACTORS = st.floats(1e-3, 1e3)


@given(SIZES, FACTORS, st.floats(-3, 3))
def test_a_power_of_the_size_is_found(sizes: list[int], factor: float, power: float) -> None:
    assert slope(sizes, [factor * x**power for x in sizes]) == pytest.approx(power, abs=1e-6)


@given(st.data(), SIZES, FACTORS, FACTORS)
def test_a_slope_knows_no_units_and_no_order(
    data: st.DataObject, sizes: list[int], across: float, up: float
) -> None:
    costs = data.draw(st.lists(FACTORS, min_size=len(sizes), max_size=len(sizes)))
    expected = slope(sizes, costs)
    scaled = slope([across * x for x in sizes], [up * y for y in costs])
    assert scaled == pytest.approx(expected, rel=1e-4, abs=1e-4)
    points = data.draw(st.permutations(list(zip(sizes, costs, strict=True))))
    mixed = slope(*map(list, zip(*points, strict=True)))
    assert mixed == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_a_slope_needs_two_sizes_above_nothing() -> None:
    for sizes, costs in (([2], [1.0]), ([2, 2], [1.0, 2.0]), ([0, 1], [1.0, 1.0])):
        with pytest.raises(ValueError):
            slope(sizes, costs)


def test_rows_are_part_of_the_work() -> None:
    curve = Curve("it", "live nodes", "us", (16, 48, 112), (2.0, 4.0, 16.0), rows=16)
    assert curve.work == (32, 64, 128)
    assert curve.per_work == (1 / 16, 1 / 16, 1 / 8)
    assert curve.last_exponent == pytest.approx(2)
    assert 1 < curve.exponent < 2


@given(st.integers(2, 300))
def test_of_the_tree_half_hangs_from_its_first_node(count: int) -> None:
    kept = trees.half(count)
    assert abs(len(kept) + 1 - count / 2) <= count / 4 + 1
    assert all(trees.parent(node) in {0, *kept} for node in kept)
    rows = trees.rows(7, range(count))
    assert [row.slot for row in rows] == list(range(7, 7 + count))
    for node, row in enumerate(rows):
        above = trees.parent(node)
        before = () if above == trees.TIP else rows[above].visible
        assert row.visible == (*before, 7 + node)
        assert row.position == 6 + len(row.visible)


def effects(call: Call) -> Iterable[Any]:
    step: Any = call()
    found: Iterable[Any] = step[1]
    return found


def jobs(call: Call, kind: type) -> list[Any]:
    return [e.job for e in effects(call) if isinstance(e, Compute) and isinstance(e.job, kind)]


def sent(call: Call, kind: type) -> list[Any]:
    return [e.message for e in effects(call) if isinstance(e, Send) and isinstance(e.message, kind)]


@pytest.mark.parametrize("size", [16, 40])
def test_a_stages_steps_do_what_they_are_named_for(size: int) -> None:
    committed = 600
    steps = stage_steps(committed, size)
    (session,) = steps.state.sessions.values()
    assert (session.slots.committed, session.slots.used) == (committed, committed + size)
    (job,) = jobs(steps.receive(), Forward)
    assert job.rows == trees.rows(committed, range(size, size + ROWS))
    (verdict,) = sent(steps.end_pass(), Verdict)
    assert verdict.ids == tuple(range(committed + size, committed + size + ROWS))
    (compact,) = jobs(steps.prune(), Compact)
    kept = [committed, *(committed + node for node in trees.half(size))]
    assert compact.keep == tuple(kept)
    (job,) = jobs(steps.receive_pruned(), Forward)
    assert {row.visible[-1] for row in job.rows} == {row.slot for row in job.rows}
    depth = len(trees.line(trees.half(size)[-1]))
    assert {row.position for row in job.rows} == {committed + depth}
    assert job.committed == committed + 1


@pytest.mark.parametrize("size", [16, 70])
def test_a_draft_nodes_steps_do_what_they_are_named_for(size: int) -> None:
    steps = DraftSteps(size)
    (cut,) = sent(steps.cut(), Segment)
    pieces = -(-size // ROWS)  # of equal length, behind the root
    assert len(cut.ids) == 1 + -(-size // pieces)
    verdict = steps.verdict()
    (emit,) = (e for e in effects(verdict) if isinstance(e, Emit))
    assert (len(emit.tokens), emit.hits) == (1, 1)
    (prune,) = sent(verdict, PruneIndices)
    assert len(prune.keep) == len(trees.half(size))
    merged: Any = steps.merge()()
    (session,) = merged[0].sessions.values()
    assert len(session.tree) == size + 1


def test_calls_take_turns_and_each_is_made_once_before_it_is_timed() -> None:
    order: list[str] = []
    found = medians([lambda: order.append("a"), lambda: order.append("b")], repeats=2)
    assert order == ["a", "a", "b", "b"] * 2
    assert len(found) == 2


def counted(ticks: list[int]) -> Any:
    return lambda: ticks.append(1)


@pytest.mark.torch
def test_every_part_measures_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (context, live_nodes):
        monkeypatch.setattr(module, "STEPS", 2)
        monkeypatch.setattr(module, "PASSES", 2)
    monkeypatch.setattr(stages, "TOKENS", 8)
    monkeypatch.setattr(stages, "REAL_TOKENS", 4)
    monkeypatch.setattr(stages, "REPEATS", 1)
    ticks: list[int] = []
    parts = {
        "context": context.measure(counted(ticks), (20, 150)),
        "live": live_nodes.measure(counted(ticks), (16, 32)),
        "stages": stages.measure(counted(ticks), (1, 2), real=(1,)),
    }
    assert len(ticks) == 4 + 4 + 3
    assert [len(curves) for curves in parts.values()] == [7, 9, 6]
    for curves in parts.values():
        assert all(cost > 0 for curve in curves for cost in curve.costs)
    sizes = {curve.sizes for curve in parts["stages"]}
    assert sizes == {(1, 2), (1,)}
    passes = [curve.name for curve in parts["context"] if curve.unit == "ms"]
    assert passes == [f"{mode}, {rows}" for mode in MODES for rows in ("1 row", "16 rows")]


CURVES = [
    Curve("stage: prune", "live nodes", "us", (16, 48), (1.0, 2.0), rows=16),
    Curve("exact, 16 rows", "live nodes", "ms", (16, 48), (3.0, 3.0), rows=16),
]


def test_figures_name_the_exponents_and_hold_the_curves() -> None:
    found: Any = page.figures_of({"live": CURVES})
    assert found["growth_exponent_live_stage_prune"] == pytest.approx(1)
    assert found["growth_exponent_live_exact_16_rows"] == pytest.approx(0)
    assert found["curves"]["live_stage_prune"]["per_row_and_node"] == (1 / 32, 2 / 64)
    json.dumps(found)


def test_pages_and_figures_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(command.PARTS, "live", lambda tick: CURVES)
    out = tmp_path / "new"
    assert main(["growth", "--only", "live", "--json", "--out", str(out)]) == 0
    assert json.loads(capsys.readouterr().out)["curves"]
    assert (out / "growth-live.png").read_bytes().startswith(b"\x89PNG")
    text = (out / "growth.md").read_text()
    assert "growth-live.png" in text
    assert "| stage: prune | us | 1.00 | 2.00 | +1.00 | +1.00 |" in text


def test_user_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["growth", "--only", "live,speed"]) == 2
    assert "there is no part 'speed'" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["growth", "--out", str(tmp_path / "file")]) == 2
    assert "cannot write" in capsys.readouterr().err
