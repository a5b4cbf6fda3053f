"""Every family we claim: the same tokens as transformers' own generate, however it is cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncspec.backend.hf.checkpoint import open_checkpoint
from asyncspec.backend.hf.families import SUPPORTED
from asyncspec.backend.hf.reference import decode
from backend.conformance import Walk, sequential
from backend.probe import Probe, cut
from backend.tiny import FAMILIES, LAYERS, VOCAB

pytestmark = pytest.mark.torch

NEW = 32


@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_as_generate(family: str, tiny: Callable[..., Path]) -> None:
    path = tiny(family)
    random = Random(family)
    prompt = [random.randrange(3, 150) for _ in range(70)]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
    )
    want = out[0, len(prompt) :].tolist()
    checkpoint = open_checkpoint(path)
    for stages in (1, 2, 3, LAYERS):
        assert decode(cut(checkpoint, stages), prompt, NEW) == want
    assert decode(cut(checkpoint, 2, mode="fast"), prompt, NEW) == want


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tree_has_the_bits_of_the_sequence(
    family: str, dtype: str, tiny: Callable[..., Path]
) -> None:
    checkpoint = open_checkpoint(tiny(family))
    stages = cut(checkpoint, 2, dtype=dtype)
    assert [stage.guarantee for stage in stages] == ["bitwise"] * 2
    random = Random(family + dtype)
    tokens = [random.randrange(min(VOCAB, 150)) for _ in range(90)]
    probe = Probe(stages)
    drawn = sequential(stages, tokens, 50)
    alone = probe.take()
    walk = Walk(tokens, 50, 150, random, watch=probe.watch)
    assert walk.run(stages) == drawn
    assert probe.different(alone) == []


def test_every_claimed_family_is_tried(tiny: Callable[..., Path]) -> None:
    assert {open_checkpoint(tiny(f)).facts.architecture for f in FAMILIES} == SUPPORTED
