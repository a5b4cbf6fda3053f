"""The bench's smaller measurements."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from asyncspec.sim.recorded import FORMAT, LanguageHeader, RecordedText, write_language
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from tools.bench import coverage, stage_time


def test_coverage_counts_places_by_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = ((-0.1, -2.0), (-0.1, -2.0), (-0.1, -2.0), (-0.1, -2.0))
    text = RecordedText((1,), (5, 6, 7, 8), ((5, 9), (9, 6), (9, 4), (8, 1)), scores)
    assert coverage.coverage([text]) == {1: 0.5, 2: 0.75}
    file = tmp_path / "language"
    write_language(file, LanguageHeader(FORMAT, "t", "d", 10), [text])
    assert coverage.run(argparse.Namespace(file=file, json=True)) == 0
    assert json.loads(capsys.readouterr().out) == {"1": 0.5, "2": 0.75}
    assert coverage.run(argparse.Namespace(file=tmp_path / "none", json=True)) == 2


@pytest.mark.torch
def test_a_stages_pass_is_timed_for_every_number_of_rows() -> None:
    options = argparse.Namespace(
        target=BUNDLED_TARGET, layers=1, context=8, repeats=2, mode="exact"
    )
    seconds = stage_time.measure(options, (1, 4))
    assert list(seconds) == [1, 4]
    assert all(0 < t < 10 for t in seconds.values())
