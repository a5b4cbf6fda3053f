"""``python tools/bench grid``: its cells, ratios and output."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from asyncspec_nodes.simulation.cluster import simulate
from tools.bench import grid
from tools.bench.__main__ import main


def test_the_cells_are_those_of_the_regular_grid_and_of_a_wider_space() -> None:
    assert len(set(grid.core_cells())) == 108
    assert len(set(grid.shared_cells())) == 54
    assert len(set(grid.user_cells())) == 54
    wide = list(grid.wide_cells(40))
    assert len(set(wide)) == 40
    assert wide == list(grid.wide_cells(41))[:40]
    for key in grid.Cell.__struct_fields__:
        if key not in ("processors", "arrival_seconds", "tokens", "texts"):
            assert len({getattr(cell, key) for cell in wide}) > 1, key


def test_a_draft_changes_and_the_text_does_not() -> None:
    cell = grid.Cell(coverage=(0.97,), later=(0.05,), tokens=400)
    language = grid.setting(cell).language
    same = grid.setting(grid.Cell(coverage=(0.97,), tokens=400)).language
    path, hits = 0, [0, 0]
    for position in range(64, 464):
        truth = language.truth(path)
        assert truth == same.truth(path)
        hits[position >= 264] += language.propose(path, position, 0, 1)[0] == [truth]
        path = position * truth
    assert hits[0] > hits[1] + 100


def test_texts_of_a_cell_count_alike() -> None:
    speeds = [grid.speed((grid.Cell(tokens=40, texts=texts), grid.FLOW)) for texts in (1, 2)]
    other = simulate(grid.setting(grid.Cell(tokens=40), 2), grid.FLOW).times[0]
    assert speeds[1] ** 2 == pytest.approx(speeds[0] * (len(other) - 1) / (other[-1] - other[0]))
    assert speeds[1] != speeds[0]


def test_ratios_are_to_plain_decoding_the_best_fixed_policy_and_flowspec() -> None:
    speeds = dict.fromkeys(grid.FIXED, 1.0) | {"chain": 4.0, "flowspec": 2.0, "flow": 3.0}
    assert grid.ratios(speeds) == (3.0, 0.75, 1.5)
    found = grid.summary({grid.Cell(): speeds, grid.Cell(stages=2): speeds | {"flow": 12.0}})
    assert found[0]["geometric mean"] == pytest.approx(6.0)
    assert found[0]["least"] == 3.0


def test_it_runs_the_cells_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, plot = tmp_path / "cells.json", tmp_path / "map.svg"
    cells = [grid.Cell(stages=2, tokens=8), grid.Cell(stages=1, tokens=8, sessions=2, jitter=0.1)]
    file.write_bytes(msgspec.json.encode(cells))
    words = ["grid", "--cells", str(file), "--jobs", "1", "--json", "--plot", str(plot)]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cells"] == 2
    assert [set(one["speeds"]) for one in found["by cell"]] == [{*grid.FIXED, "flow"}] * 2
    assert plot.stat().st_size
    assert main([*words[:-2], "--tokens", "4", "--texts", "2"]) == 0
    short = json.loads(capsys.readouterr().out)
    assert [one["cell"].count("tokens=4 texts=2") for one in short["by cell"]] == [1, 1]
    assert main([*words[:-2], "--tokens", "1"]) == 2
    capsys.readouterr()
    for wrong, text in (
        (tmp_path / "no" / "map.svg", "there is no folder"),
        (tmp_path / "map.jpeg2", "the name must end in .png or .svg"),
        (tmp_path, "the name must end in"),
    ):
        # Before any cell: these would take days.
        assert main(["grid", "--cells", "wide", "--count", "9999", "--plot", str(wrong)]) == 2
        said = capsys.readouterr().err
        assert text in said
        assert said.count("\n") == 1
    assert main(["grid", "--cells", str(tmp_path / "no.json")]) == 2
    file.write_text('[{"stages": 2, "draft": 1}]')
    assert main(["grid", "--cells", str(file)]) == 2
    assert "draft" in capsys.readouterr().err
