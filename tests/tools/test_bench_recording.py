"""``python tools/bench --record``: figures of a benchmark become a table of a result file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncspec.sim.recorded import FORMAT, LanguageHeader, RecordedText
from tools.bench import recording
from tools.bench.__main__ import main
from tools.bench.docs import results
from tools.bench.record_language import write_language


@pytest.fixture
def language(tmp_path: Path) -> Path:
    text = RecordedText((1,), (5, 6), ((5, 9), (9, 6)), ((-0.1, -2.0), (-0.1, -2.0)))
    write_language(tmp_path / "language", LanguageHeader(FORMAT, "t", "d", 10), [text])
    return tmp_path / "language"


def test_a_table_names_machine_commit_and_command(
    tmp_path: Path, language: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "FOLDER", tmp_path)
    for name in ("first", "second", "first"):
        assert main(["coverage", str(language), "--record", f"sources#{name}"]) == 0
    found = results.load(tmp_path / "sources.json")
    assert list(found.tables) == ["first", "second"]
    table = found.tables["first"]
    assert table.rows == (("1", 0.5), ("2", 1.0))
    assert table.command == f"python tools/bench coverage {language} --record 'sources#first'"
    assert table.machine
    assert table.commit
    assert table.date
    # Cells without a value of their own are not written.
    assert "caption" not in json.loads((tmp_path / "sources.json").read_text())["tables"]["first"]
