"""The bundled EAGLE head guesses the bundled target's own text well above chance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import asyncspec
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec.plugins.hf.heads.eagle.source import EagleSource, load_eagle
from backend.eagle_growth import ONE, extend, grow

pytestmark = pytest.mark.torch

MODELS = Path(asyncspec.__file__).parent / "models"
TARGET, HEAD = MODELS / "demo-target", MODELS / "demo-eagle"
PROMPTS = (
    "Once upon a time there was a little girl who",
    "Question: Tom has 3 apples and buys 5 more. How many apples does he have now?\nAnswer:",
)
NEW = 48


@pytest.fixture(scope="module")
def texts() -> list[tuple[list[int], int, torch.Tensor, torch.Tensor]]:
    """Per prompt: tokens of prompt and greedy answer, length of the prompt, and the hidden states
    after and before the final norm."""
    model: Any = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(TARGET)
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            text = model.generate(ids, max_new_tokens=NEW, do_sample=False)
            before: list[torch.Tensor] = []
            hook = model.model.norm.register_forward_pre_hook(
                lambda _, given, kept=before: kept.append(given[0])
            )
            after = model.model(text).last_hidden_state[0]
            hook.remove()
        found.append((text[0].tolist(), ids.shape[1], after, before[0][0]))
    return found


def agreement(
    source: EagleSource, text: list[int], start: int, features: torch.Tensor, depth: int
) -> float:
    """How often the best path of ``depth`` is what the target wrote, from ``start`` on."""
    source.release(ONE)
    extend(source, features[: start - 1], text[1:start])
    right = total = 0
    for end in range(start, len(text) - depth + 1):
        grown = grow(source, depth, 1, depth)
        right += list(grown[1]) == text[end : end + depth]
        total += 1
        extend(source, features[end - 1 : end], text[end : end + 1])
    return right / total


def test_the_head_knows_its_target(
    texts: list[tuple[list[int], int, torch.Tensor, torch.Tensor]],
) -> None:
    source = load_eagle(HEAD, open_checkpoint(TARGET))
    assert source.features.depths == ()
    for text, start, after, before in texts:
        # Chance is 1 in 1,024.
        assert agreement(source, text, start, after, 1) > 0.6
        assert agreement(source, text, start, after, 3) > 0.25
        # Which side of the final norm the features come from matters.
        assert agreement(source, text, start, before, 1) < 0.5 * agreement(
            source, text, start, after, 1
        )
