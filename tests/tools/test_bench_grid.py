"""``python tools/bench grid``: its cells, ratios and output."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from tools.bench import grid
from tools.bench.__main__ import main

pytestmark = pytest.mark.nightly


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
