"""The bench's comparison of trees with sequences, bit by bit."""

from __future__ import annotations

import json

import pytest
import torch

from asyncspec.backend.hf import stage
from asyncspec.backend.hf.kernels.cpu.half_precision import query_key_products
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from tools.bench.__main__ import main
from tools.bench.bits.compare import LENGTH

pytestmark = pytest.mark.torch

SMALL = ["bits", "--models=smollm2-135m", "--layers=1", "--json"]


def test_trees_have_the_bits_of_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--types=float32,bfloat16,int8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [result["type"] for result in found] == ["float32", "bfloat16", "int8"]
    for result in found:
        assert result["guarantee"] == "bitwise"
        assert result["compared"] == {"positions": LENGTH, "bits": 0, "tokens": 0}


def test_a_wrong_report_of_a_stage_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose passes of more than 32 rows have other bits."""

    def sees(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        scores = query_key_products(query, keys)
        return scores * (1 + 1e-6) if query.shape[1] > 32 else scores

    monkeypatch.setattr("asyncspec.backend.hf.kernels.cpu.half_precision.query_key_products", sees)
    monkeypatch.setattr(stage, "confirm", lambda *_: "bitwise")
    assert main([*SMALL, "--types=float32"]) == 1
    (result,) = json.loads(capsys.readouterr().out)
    assert 0 < result["compared"]["bits"] <= LENGTH


def test_a_checkpoint_is_tried_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bits", f"--target={BUNDLED_TARGET}"]) == 0
    line = capsys.readouterr().out.splitlines()[2]
    assert line.startswith(f"| {BUNDLED_TARGET} | float16 | bitwise | {LENGTH} | 0 | 0 |")


@pytest.mark.parametrize("option", ["--models=llama-9", "--types=int3", "--target=/nowhere"])
def test_unknown_names_are_one_line(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bits", option]) in (1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert option.partition("=")[2] in err
