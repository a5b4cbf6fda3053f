"""The bench's comparison of trees with sequences, bit by bit."""

from __future__ import annotations

import json

import pytest
from torch import Tensor

from asyncspec.plugins.hf.attention.attention import TreeMask
from asyncspec.plugins.hf.model import stage
from asyncspec.plugins.hf.model.shard import Shard
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

    logits = Shard.logits

    def of_many(
        shard: Shard, inputs: Tensor, positions: Tensor, tree: TreeMask, rows: Tensor
    ) -> Tensor:
        found = logits(shard, inputs, positions, tree, rows)
        return found * (1 + 1e-6) if len(inputs) > 32 else found

    monkeypatch.setattr(Shard, "logits", of_many)
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
