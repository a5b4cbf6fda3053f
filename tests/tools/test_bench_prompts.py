"""The benchmark of prompts reads each of them with every reader; how fast is not asked here."""

from __future__ import annotations

import json

import pytest

from tools.bench.__main__ import main

pytestmark = pytest.mark.nightly


@pytest.mark.torch
@pytest.mark.processes
def test_every_reader_has_the_same_first_token(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--dtype fp32 --lengths 96 --stages 1 2 --repeats 1 --beside 120 --json"
    assert main(["prompts", *words.split()]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["reader"] for row in rows} == {"transformers", "1 stage", "2 stages"}
    for row in rows:
        assert row["tokens"] == 95
        assert row["same_token"] == row["repeats"] == 1
        assert row["peak_mib"] > 0
        assert (row["beside"] > 0) == ("stage" in row["reader"])
