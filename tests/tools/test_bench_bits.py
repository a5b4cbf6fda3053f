"""The bench's comparison of trees with sequences, bit by bit."""

from __future__ import annotations

import json

import pytest

from tools.bench.__main__ import main
from tools.bench.bits.compare import LENGTH

pytestmark = [pytest.mark.nightly, pytest.mark.torch]

SMALL = ["bits", "--models=smollm2-135m", "--layers=1", "--json"]


def test_trees_have_the_bits_of_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--types=float32,bfloat16,int8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [result["type"] for result in found] == ["float32", "bfloat16", "int8"]
    for result in found:
        assert result["guarantee"] == "bitwise"
        assert result["compared"] == {"positions": LENGTH, "bits": 0, "tokens": 0}
