"""What comes back of a target's hidden states is what its plain forward pass computes, however the
model is cut, in whatever tree; and asking for it changes no token."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncspec.backend.base import Mode, StageBackend
from asyncspec.core.jobs import Admit, Forward, Row, TensorRows
from asyncspec.core.sampling import Sampling
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec.plugins.hf.model.stage import HFStage
from asyncspec.plugins.hf.model.wire import from_wire, to_wire
from asyncspec.plugins.toy.model import ToyModel, ToyStage
from asyncspec.testing.pipeline import SESSION, Pipeline, Walk, one_by_one, sequential
from asyncspec_protocol.ids import NodeId, SegmentId
from asyncspec_protocol.messages import FINAL
from backend.eagle_heads import TARGET
from backend.probe import Probe, cut
from backend.tiny import FAMILIES, VOCAB
from effort import NIGHTLY

pytestmark = pytest.mark.torch

MakeTiny = Callable[..., Path]
LENGTH, PROMPT = 50, 20
# EAGLE-1/2's; EAGLE-3's of eight layers; the ends of the model; one tap, at a cut, and the end.
WANTED: list[tuple[int, ...]] = [(FINAL,), (2, 4, 5), (0, 8), (0, 1, 7), (4, FINAL)]

CUTS: tuple[tuple[int, Mode], ...] = ((1, "exact"), (2, "fast"))
KINDS: tuple[tuple[int, ...], ...] = ((FINAL,), (0, 2, 5))


def text(seed: int, vocab: int = VOCAB) -> list[int]:
    random = Random(seed)
    return [random.randrange(vocab) for _ in range(LENGTH)]


@functools.cache
def plain_model(path: Path) -> Any:
    """By Hugging Face alone."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def plain(path: Path, tokens: Sequence[int], features: Sequence[int]) -> torch.Tensor:
    """Features [n, F] by Hugging Face alone."""
    model = plain_model(path)
    ends: list[torch.Tensor] = []
    (norm,) = (part for name, part in model.model.named_children() if "norm" in name)
    hook = norm.register_forward_pre_hook(lambda _, given: ends.append(given[0]))
    with torch.inference_mode():
        out = model.model(torch.tensor([tokens]), output_hidden_states=True)
    hook.remove()
    # Its last hidden state is the normed one, whatever the depth it stands for.
    states = [*out.hidden_states[:-1], *ends]
    taken = [out.last_hidden_state if d == FINAL else states[d] for d in features]
    return torch.cat(taken, dim=-1)[0]


def walked(
    stages: Sequence[StageBackend],
    tokens: Sequence[int],
    features: tuple[int, ...],
    vocab: int = VOCAB,
) -> tuple[list[int], list[Any]]:
    """What is drawn in a random tree around the text, and the features of its nodes."""
    walk = Walk(tokens, PROMPT, vocab, Random(3), features=features)
    drawn = walk.run(stages)
    assert len(walk.featured) == len(tokens)
    return drawn, walk.featured


@pytest.fixture(scope="module")
def whole(tiny: MakeTiny) -> dict[int, list[HFStage]]:
    """A target in one, two and four stages."""
    checkpoint = open_checkpoint(tiny("llama", **TARGET))
    return {count: cut(checkpoint, count) for count in (1, 2, 4)}


@pytest.fixture(scope="module")
def bare(whole: dict[int, list[HFStage]]) -> list[int]:
    """What is drawn where nobody asks for features."""
    return sequential(whole[1], text(1), PROMPT)


@pytest.mark.parametrize("features", WANTED, ids=str)
def test_features_are_those_of_a_plain_pass(
    tiny: MakeTiny, whole: dict[int, list[HFStage]], bare: list[int], features: tuple[int, ...]
) -> None:
    tokens, want = text(1), plain(tiny("llama", **TARGET), text(1), features)
    first: list[torch.Tensor] = []
    for stages in whole.values():
        drawn, rows = walked(stages, tokens, features)
        assert drawn == bare
        found = torch.stack(rows)
        assert found.shape == want.shape
        torch.testing.assert_close(found, want, atol=2e-4, rtol=2e-4)
        # In exact mode a feature depends on neither neighbours nor cuts, to the last bit.
        first = first or rows
        assert torch.equal(found, torch.stack(first))


def test_positions_and_depths_differ(tiny: MakeTiny) -> None:
    """The comparison above would notice a shift by a row or by a layer."""
    path = tiny("llama", **TARGET)
    found = plain(path, text(1), (3, 4)).view(LENGTH, 2, -1)
    assert float((found[:, 0] - found[:, 1]).abs().mean()) > 0.1
    assert float((found[1:] - found[:-1]).abs().mean()) > 0.1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(tiny: MakeTiny, family: str) -> None:
    path = tiny(family)
    checkpoint = open_checkpoint(path)
    tokens = text(2, 100)
    # In turn, but nightly: both modes and both kinds of features for every family; all four pairs
    # among families.
    turn = [*FAMILIES].index(family) % 2
    cases = [*zip(CUTS, (KINDS[turn], KINDS[1 - turn]), strict=True)]
    for (count, mode), features in cases if NIGHTLY else cases[turn:][:1]:
        stages = cut(checkpoint, count, mode=mode)
        drawn, rows = walked(stages, tokens, features, 100)
        want = plain(path, tokens, features)
        torch.testing.assert_close(torch.stack(rows), want, atol=1e-3, rtol=1e-3)
        if mode == "exact":
            assert drawn == sequential(stages, tokens, PROMPT)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_asking_for_features_changes_no_bit(tiny: MakeTiny, dtype: str) -> None:
    stages = cut(open_checkpoint(tiny("llama", **TARGET)), 3, dtype)
    tokens = text(4)
    with probing(stages) as probe:
        sequential(stages, tokens, PROMPT)
        alone = probe.take()
        for features in WANTED:
            one_by_one(Pipeline(stages, features=features), tokens, PROMPT)
            assert probe.different(alone) == []


@contextmanager
def probing(stages: Any) -> Iterator[Probe]:
    probe = Probe(stages)
    try:
        yield probe
    finally:
        probe.stop()


def test_bfloat16_features_travel_as_they_are(tiny: MakeTiny) -> None:
    checkpoint = open_checkpoint(tiny("llama", **TARGET))
    tokens = text(5)
    _, one = walked(cut(checkpoint, 1, "bfloat16"), tokens, (2, 4, 5))
    _, four = walked(cut(checkpoint, 4, "bfloat16"), tokens, (2, 4, 5))
    assert one[0].dtype == torch.bfloat16
    assert torch.equal(torch.stack(one), torch.stack(four))


def test_no_hook_outlives_its_pass(tiny: MakeTiny) -> None:
    """A session without features goes through untouched modules, also beside one with."""
    (stage,) = cut(open_checkpoint(tiny("llama", **TARGET)), 1)
    walked([stage], text(6), (0, 4, 8))
    walked([stage], text(6), (FINAL,))
    for module in stage.shard.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert Pipeline([stage]).send([NodeId(0)], [NodeId(-1)], [1], []) == ()


def toys(count: int, model: ToyModel) -> list[ToyStage]:
    edges = [model.layers * i // count for i in range(count + 1)]
    return [ToyStage(model, a, b) for a, b in pairwise(edges)]


@pytest.mark.parametrize("features", [(FINAL,), (2,), (0, 2, 4), (1, 2, 3)], ids=str)
def test_toy_features_are_the_models_own(features: tuple[int, ...]) -> None:
    model, tokens = ToyModel(vocab=16), text(7, 16)
    want = [model.feature(model.read(tokens[: i + 1]), features) for i in range(LENGTH)]
    for count in (1, 2, 4):
        assert walked(toys(count, model), tokens, features, 16)[1] == want


def test_what_travels_between_stages_is_checked(tiny: MakeTiny) -> None:
    """[n, 1 + aux_states, H], low to high; another width, or a row of nothing, is refused."""
    first, second = cut(open_checkpoint(tiny("llama", **TARGET)), 2)
    for stage in (first, second):
        stage.run(Admit(SESSION, 8, Sampling(), features=(1, 3, 6)))
    rows = (Row(0, 0, (0,)), Row(1, 1, (0, 1)), Row(2, 2, (0, 1, 2)))
    result = first.run(Forward(SESSION, SegmentId(0), 0, rows, tokens=(1, 2, 3)))
    wire = first.pack(TensorRows(result, (0, 2)))
    assert wire.shape == (2, 3, 64)
    back = second.unpack(wire)
    assert isinstance(back, torch.Tensor)
    assert isinstance(result, torch.Tensor)
    assert torch.equal(back, result[[0, 2]])
    for shape in ((2, 3, 65), (2, 0, 64), (2, 1, 3, 64), (6, 3, 64)):
        with pytest.raises(ValueError, match="hidden states of"):
            second.unpack(type(wire)(wire.dtype, shape, wire.data))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_rows_with_numbers_that_are_not_finite_are_refused(number: float) -> None:
    rows = torch.ones(3, 8)
    rows[1, 5] = number
    wire = to_wire(TensorRows(rows, (0, 1, 2)))
    with pytest.raises(ValueError, match="not finite"):
        from_wire(wire, torch.float32, 8)
