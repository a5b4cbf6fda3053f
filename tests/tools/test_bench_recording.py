"""``python tools/bench --record``: figures of a benchmark become a table of a result file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tools.bench import recording
from tools.bench.docs import results


def measure() -> int:
    """Print figures as a benchmark does."""
    sys.stdout.write(json.dumps({"1": 0.5, "2": 1.0}))
    return 0


def test_a_table_names_machine_commit_and_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "FOLDER", tmp_path)
    for name in ("first", "second", "first"):
        assert recording.record(f"sources#{name}", ["grid", "--json"], measure) == 0
    loaded = results.load(tmp_path / "sources.json")
    assert list(loaded.tables) == ["first", "second"]
    table = loaded.tables["first"]
    assert table.rows == (("1", 0.5), ("2", 1.0))
    assert table.command == "python tools/bench grid --json"
    assert table.machine
    assert table.commit
    assert table.date
    # Cells without a value of their own are not written.
    assert "caption" not in json.loads((tmp_path / "sources.json").read_text())["tables"]["first"]
