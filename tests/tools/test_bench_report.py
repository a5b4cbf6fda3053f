"""``bench report``: keys, resuming, and tables from cells made by hand. No models."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.core.sampling import Sampling
from asyncspec.policy.registry import POLICIES
from asyncspec.sim.costs import PRESETS
from tools.bench.__main__ import main
from tools.bench.prompts import Prompt
from tools.bench.report.cell import Ask, Cell, Setting, Stats
from tools.bench.report.exhibit import BY_SET, Exhibit, Point, cells
from tools.bench.report.exhibits import choose
from tools.bench.report.markdown import table
from tools.bench.report.metrics import METRICS, Run
from tools.bench.report.models import SOURCES
from tools.bench.report.plan import Identity, Plan
from tools.bench.report.store import Store
from tools.bench.report.table import fill

SETS = {name: tuple(Prompt(name, i, f"{name} {i}") for i in range(3)) for name in ("code", "story")}
CELL = Cell(Ask(SETS["code"][0]), Setting("flowspec", "draft"))
IDENTITY = Identity("code", {"target": "t", "draft": "d", "eagle": "e"}, "machine")

entries = st.lists(st.tuples(st.text(), st.integers() | st.lists(st.integers())), max_size=5)


@given(before=entries, after=entries, data=st.data())
def test_a_run_that_was_killed_goes_on_with_whole_lines(
    before: list[tuple[str, object]],
    after: list[tuple[str, object]],
    data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("store") / "results.jsonl"
    write(path, before)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    survivors = before[: whole[:cut].count(b"\n")]
    write(path, after)
    found = Store(path)
    found.close()
    expected = {**dict(survivors), **dict(after)}
    assert {name: found[name] for name in expected} == expected
    assert all(name in expected or name not in found for name, _ in before)


def write(path: Path, values: list[tuple[str, object]]) -> None:
    store = Store(path)
    for name, value in values:
        store.add(name, value, about="anything")
    store.close()


def test_a_key_changes_with_all_a_result_depends_on_and_with_nothing_else() -> None:
    ask, setting = CELL.ask, CELL.setting
    others = [
        replace(CELL, ask=replace(ask, prompt=SETS["code"][1])),
        replace(CELL, ask=replace(ask, sampling=Sampling(temperature=1.0))),
        replace(CELL, ask=replace(ask, sampling=Sampling(temperature=1.0, seed=1))),
        replace(CELL, ask=replace(ask, tokens=64)),
        replace(CELL, setting=replace(setting, policy="pruned")),
        replace(CELL, setting=replace(setting, source="eagle")),
        replace(CELL, setting=replace(setting, stages=3)),
        replace(CELL, setting=replace(setting, cost=PRESETS["server"])),
        replace(CELL, setting=replace(setting, engine="real")),
    ]
    keys = [IDENTITY.of(cell) for cell in (CELL, *others)]
    keys += [replace(IDENTITY, code="other").of(CELL)]
    models = IDENTITY.models
    keys += [
        replace(IDENTITY, models={**models, name: "x"}).of(CELL) for name in ("target", "draft")
    ]
    assert len(set(keys)) == len(keys)
    # Another head does not concern a draft model, nor another machine the virtual clock.
    elsewhere = replace(IDENTITY, models={**models, "eagle": "x"}, machine="other")
    assert elsewhere.of(CELL) == IDENTITY.of(CELL)


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


def measured(cell: Cell) -> Stats:
    """Five tokens in eight turns; the better policy needs half as many, and less in ``story``."""
    turns = 4 if cell.setting.policy == "flowspec" else 8
    return stats(6, turns - 2 * (cell.ask.prompt.set == "story"))


def test_a_table_by_sets_has_ratios_of_sums() -> None:
    points = tuple(Point(name, Setting(name), BY_SET, "T = 0") for name in ("chunked", "flowspec"))
    exhibit = Exhibit("x", "Title", points, ("tokens_per_second",), baseline="chunked")
    (found,) = fill(exhibit, SETS, 8, measured)
    assert found.columns == ("code", "story", "all")
    assert list(table(exhibit, found)) == [
        "**Title, T = 0**",
        "",
        "| method | code | story | all |",
        "| --- | ---: | ---: | ---: |",
        "| chunked | 1.25 (1.00) | 1.67 (1.00) | 1.43 (1.00) / 1.25..1.67 |",
        "| flowspec | 2.50 (2.00) | 5.00 (3.00) | 3.33 (2.33) / 2.50..5.00 |",
    ]
    assert found.values["flowspec"]["all"].requests == 6


def test_a_table_of_metrics_has_them_side_by_side() -> None:
    exhibit = Exhibit("x", "Title", (Point("FlowSpec", Setting("flowspec")),), ("alt", "alr"))
    (found,) = fill(exhibit, SETS, 8, measured)
    assert found.columns == ("ALT", "ALR")
    assert found.values["FlowSpec"]["ALT"].value == pytest.approx(30 / 18)
    assert found.values["FlowSpec"]["ALR"].value == pytest.approx(2.5)


def test_the_papers_counts_are_the_papers() -> None:
    # One tree of five segments on four stages: nine turns for Chunk-PP, eight for the others.
    chunked, pruned = (Run(name, stats(6, 9, rounds=1)) for name in ("chunked", "pruned:depth=4"))
    assert METRICS["alt"].of([chunked]) == METRICS["alt"].of([pruned]) == 5 / 9
    assert METRICS["paper_alt"].of([chunked]) == 6 / 9
    assert METRICS["paper_alt"].of([pruned]) == 6 / 8
    # Three rounds are 2 to the program; with one round it divides by zero.
    assert METRICS["paper_alr"].of([Run("pruned", stats(6, 9, rounds=3))]) == 3
    assert METRICS["paper_alr"].of([pruned]) != METRICS["paper_alr"].of([pruned])


def test_sparse_exhibits_ask_half_of_each_set() -> None:
    point = Point("a", CELL.setting)
    dense, sparse = (Exhibit("x", "", (point,), (), sparse=flag) for flag in (False, True))
    assert len(cells(dense, point, SETS, 8)) == 6
    assert [cell.ask.prompt.number for cell in cells(sparse, point, SETS, 8)] == [0, 0]


@pytest.mark.parametrize("stages", [None, 2])
def test_everything_shown_can_be_measured(stages: int | None) -> None:
    exhibits = choose(None, stages, real=False)
    for exhibit in exhibits:
        assert set(exhibit.metrics) <= METRICS.keys()
        rows = {point.row for point in exhibit.points}
        assert exhibit.baseline in (*rows, "")
        for point in exhibit.points:
            assert point.setting.policy in POLICIES
            assert point.setting.source in SOURCES
    assert {one.name for one in choose(None, stages, real=True)} < {one.name for one in exhibits}


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--only", "table9"], "there is no table or figure 'table9'; there are sources, "),
        (["--per-file", "0"], "--per-file is 0; it must be at least 1"),
        (["--engine", "real", "--only", "flowspec-figure5"], "only the virtual clock has"),
        (["--draft", "/nowhere"], "/nowhere"),
    ],
)
def test_a_users_mistake_is_one_line(
    argv: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "code.jsonl").write_text('{"turns": ["def"]}\n')
    common = ["report", "--prompts", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main([*common, *argv]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("text", ["", "{}", "no json"])
def test_a_folder_without_prompts_is_a_users_mistake(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text:
        (tmp_path / "code.jsonl").write_text(text + "\n")
    assert main(["report", "--prompts", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert str(tmp_path) in capsys.readouterr().err
