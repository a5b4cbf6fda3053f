"""The demo models as they lie in the repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.nightly, pytest.mark.torch]
MODELS = Path(__file__).resolve().parents[2] / "asyncspec" / "models"
TEXT = (
    "The old woman looked at the little boy, and said to him that he must not go into the "
    "garden. But the boy was not afraid, and when she had gone away he opened the door."
)


def load(name: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = MODELS / name
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def test_they_are_small_enough_for_a_repository() -> None:
    sizes = [p.stat().st_size for p in MODELS.rglob("*") if p.is_file()]
    assert max(sizes) < 11_000_000
    assert sum(sizes) < 18_000_000


def test_target_and_draft_share_a_tokenizer() -> None:
    target, draft = (MODELS / n / "tokenizer.json" for n in ("demo-target", "demo-draft"))
    assert target.read_bytes() == draft.read_bytes()


def test_the_target_expects_english_and_the_draft_mostly_agrees() -> None:
    target, tokenizer = load("demo-target")
    draft, _ = load("demo-draft")
    assert target.config.num_hidden_layers == 8
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        out = target(input_ids=ids, labels=ids)
        guesses = draft(input_ids=ids).logits.topk(8).indices
    assert out.loss < 4
    choice = out.logits.argmax(-1, keepdim=True)
    assert (guesses[..., :1] == choice).float().mean() > 0.4
    assert (guesses == choice).any(-1).float().mean() > 0.8


def test_the_card_states_what_was_measured() -> None:
    card = (MODELS / "README.md").read_text()
    metrics = json.loads((MODELS / "metrics.json").read_text())
    for kind, by_drafter in metrics["agreement_held_out"].items():
        for drafter, figures in by_drafter.items():
            cells = " / ".join(f"{figures[k]:.3f}" for k in ("top1", "top4", "top8"))
            assert cells in card, (kind, drafter)
