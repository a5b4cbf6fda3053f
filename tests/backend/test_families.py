"""Every family we claim: the same tokens as transformers' own generate, however it is cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from asyncspec.backend.hf.checkpoint import open_checkpoint
from asyncspec.backend.hf.families import SUPPORTED
from asyncspec.backend.hf.reference import decode
from backend.probe import cut, same_bits
from backend.tiny import FAMILIES, LAYERS, generated

pytestmark = pytest.mark.torch

NEW = 32


@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_as_generate(family: str, tiny: Callable[..., Path]) -> None:
    path = tiny(family)
    random = Random(family)
    prompt = [random.randrange(3, 150) for _ in range(70)]
    want = generated(path, prompt, NEW)
    assert len(set(want)) > NEW // 8, "one token over and over would prove nothing"
    checkpoint = open_checkpoint(path)
    for stages in (1, 2, 3, LAYERS):
        assert decode(cut(checkpoint, stages), prompt, NEW) == want
    assert decode(cut(checkpoint, 2, mode="fast"), prompt, NEW) == want


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tree_has_the_bits_of_the_sequence(
    family: str, dtype: str, tiny: Callable[..., Path]
) -> None:
    same_bits(cut(open_checkpoint(tiny(family)), 2, dtype=dtype), family + dtype)


def test_every_claimed_family_is_tried(tiny: Callable[..., Path]) -> None:
    assert {open_checkpoint(tiny(f)).facts.architecture for f in FAMILIES} == SUPPORTED
