"""The parts of tools/train_demo: corpus, batches, schedule, optimizer, attention, EAGLE head."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.nn import functional

from tools.train_demo.attention import plain_attention
from tools.train_demo.checkpoint import Checkpoint
from tools.train_demo.data import Document, hold_out
from tools.train_demo.eagle import EagleHead, HeadSize
from tools.train_demo.eagle_training import head_guesses
from tools.train_demo.llama import build_llama, next_token_loss
from tools.train_demo.recipe import QUICK, Shape
from tools.train_demo.schedule import Budget
from tools.train_demo.tokens import Batches, Stream
from tools.train_demo.train import Setting, Stage, train
from tools.train_demo.workers import Group

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.nightly, pytest.mark.torch]
SHAPE = Shape(layers=1, hidden=16, heads=2, kv_heads=1, ffn=24)


def test_hold_out_keeps_some_back_and_is_stable() -> None:
    documents = [Document(f"d{i}", "x" * 100) for i in range(50)]
    split = hold_out(documents, 0.1)
    assert len(split.held_out) == 5
    assert len(split.train) == 45
    assert hold_out(documents[::-1], 0.1).held_out == split.held_out


def small_batches() -> Batches:
    ids = np.arange(3, 203, dtype=np.uint16)
    stream = Stream(ids, np.asarray([0, 100], dtype=np.int64))
    mix = {"story": 0.5, "math": 0.5}
    return Batches({"story": stream, "math": stream}, mix, 16, long_every=4, seed=1)


def test_batches_depend_on_stage_step_and_rank_alone() -> None:
    batches = small_batches()
    rows = batches.rows("target", 2, 0, 4)
    assert rows.shape == (4, 16)
    assert (rows[:, 0] == 1).all()  # BOS
    assert torch.equal(rows, small_batches().rows("target", 2, 0, 4))
    for other in (("draft", 2, 0), ("target", 4, 0), ("target", 2, 1)):
        assert not torch.equal(rows, batches.rows(*other, 4))


def test_plain_attention_is_causal_attention() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 9, 8)
    wanted = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(plain_attention(query, key, value, 8**-0.5), wanted)


def test_the_heads_second_step_is_the_first_on_its_own_guess() -> None:
    """Row i at depth two equals a plain pass whose feature i is the guess and the rest true."""
    torch.manual_seed(0)
    head = EagleHead(HeadSize(SHAPE, vocab=32, rope_theta=10000.0, eps=1e-5))
    rows, features = torch.randint(0, 32, (2, 7)), torch.randn(2, 7, 16)
    one, two = head_guesses(head, rows, features)
    assert one.shape == (2, 6, 16)
    assert two.shape == (2, 5, 16)
    for i in range(5):
        mixed = features[:, :-1].clone()
        mixed[:, i + 1] = one[:, i]
        again, _ = head(rows[:, 1:], mixed)
        torch.testing.assert_close(two[:, i], again[:, i + 1])


class Stop(Exception):
    """Stands for a run that was killed."""


def run_tiny(path: Path, stop_at: int | None) -> dict[str, torch.Tensor]:
    model: Any = build_llama(SHAPE, 256, 32, seed=3)
    calls = iter(range(1000))

    def loss(rows: torch.Tensor) -> torch.Tensor:
        if next(calls) == stop_at:
            raise Stop
        return next_token_loss(model, rows)

    setting = Setting(
        QUICK, small_batches(), Group(0, 1), torch.device("cpu"), Console(file=io.StringIO())
    )
    progress = train(Stage("target", model, loss, Budget(1.0, 640)), setting, Checkpoint(path, "x"))
    assert progress.finished
    assert progress.step == 11
    return dict(model.state_dict())


def test_an_interrupted_run_ends_where_an_uninterrupted_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_tiny(tmp_path / "whole.pt", None)
    monkeypatch.setattr("tools.train_demo.train.SAVE_EVERY", 0.0)
    with pytest.raises(Stop):
        run_tiny(tmp_path / "cut.pt", stop_at=6)
    resumed = run_tiny(tmp_path / "cut.pt", None)
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name
