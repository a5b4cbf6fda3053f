"""``bench dipsd-machines``: plans for four users, drafting ahead, and its page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench.__main__ import main

pytestmark = pytest.mark.nightly


def test_the_command_writes_its_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--users", "2", "--stages", "1", "--only", "equal", "--max-new-tokens", "40"]
    assert main(["dipsd-machines", *small, "--json", "--jobs", "1", "--out", str(tmp_path)]) == 0
    (reported,) = json.loads(capsys.readouterr().out)["crowds"]
    assert reported["users"] == 2
    assert reported["planned"]["policy"] == "dip-sd"
    assert (tmp_path / "machines.md").read_text().startswith("| users |")
    assert (tmp_path / "machines.png").exists()
