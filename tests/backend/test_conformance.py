"""The conformance suite, run on the Hugging Face backend and on the toy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from asyncspec.backend.base import KVType, StageBackend
from asyncspec.core.jobs import Admit, Compact, Forward, Release, Row, TensorRows
from asyncspec.core.sampling import Sampling
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec.plugins.toy.model import ToyModel, ToyStage
from asyncspec.testing import engines
from asyncspec.testing.engines import MakeStages
from asyncspec.testing.pipeline import SESSION
from asyncspec_protocol.ids import SegmentId
from backend.probe import cut
from effort import examples, nightly

pytestmark = pytest.mark.torch

VOCAB = 16
SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=11)
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3}
DRAWS = {
    "greedy": Sampling(),
    "sampled": SAMPLED,
    "greedy, penalties": Sampling(**PENALTIES),  # type: ignore[arg-type]
    "sampled, penalties": replace(SAMPLED, **PENALTIES),
}
BACKENDS = ["toy", "float32", "bfloat16", pytest.param("q8_0", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=BACKENDS)
def make(request: pytest.FixtureRequest, tiny: Callable[..., Path]) -> MakeStages:
    if request.param == "toy":
        return toy
    # Caches in 8 bits have heads of 32 numbers at least.
    caches: KVType = "q8_0" if request.param == "q8_0" else "auto"
    how: Any = {"dtype": "float32" if request.param == "q8_0" else request.param, "kv_type": caches}
    checkpoint = open_checkpoint(tiny("llama", head_dim=32) if caches == "q8_0" else tiny("llama"))
    made: dict[int, Sequence[StageBackend]] = {}

    def stages(count: int) -> Sequence[StageBackend]:
        if count not in made:
            made[count] = cut(checkpoint, count, **how)
        return made[count]

    return stages


@pytest.fixture(scope="module")
def alone(make: MakeStages) -> dict[object, list[int]]:
    """What was drawn without a tree, by the texts and settings of laws that ask for the same."""
    return {}


def toy(count: int) -> Sequence[StageBackend]:
    model = ToyModel(layers=4, vocab=VOCAB)
    edges = [4 * i // count for i in range(count + 1)]
    return [ToyStage(model, a, b) for a, b in pairwise(edges)]


@pytest.mark.parametrize("how", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_tree_equals_sequential(
    make: MakeStages, alone: dict[object, list[int]], stages: int, how: Sampling
) -> None:
    for seed in range(examples(2, quick=1)):
        engines.check_tree_equals_sequential(
            make, VOCAB, seed, stages=stages, length=25, sampling=how, alone=alone
        )


@pytest.mark.parametrize("how", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("stages", [1, 3])
def test_segments_of_one_session_that_share_passes_equal_sequential(
    make: MakeStages, alone: dict[object, list[int]], stages: int, how: Sampling
) -> None:
    engines.check_tree_equals_sequential(
        make, VOCAB, 2, stages=stages, length=25, sampling=how, coalesced=True, alone=alone
    )


def test_sessions_apart(make: MakeStages) -> None:
    engines.check_sessions_apart(make, VOCAB)


@pytest.mark.parametrize("seed", range(3))
def test_a_batch_equals_each_alone(make: MakeStages, seed: int) -> None:
    engines.check_batches_equal_sequential(make, VOCAB, seed, tuple(DRAWS.values()))


@pytest.mark.parametrize("family", [nightly("gemma2"), "gemma3", nightly("phi3"), nightly("qwen3")])
def test_a_batch_equals_each_alone_with_windows_and_caps(
    tiny: Callable[..., Path], family: str
) -> None:
    checkpoint = open_checkpoint(tiny(family))
    engines.check_batches_equal_sequential(
        lambda count: cut(checkpoint, count), VOCAB, 0, (Sampling(), SAMPLED, Sampling()), length=90
    )


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_segments_that_share_passes_with_windows_and_caps(
    tiny: Callable[..., Path], family: str
) -> None:
    checkpoint = open_checkpoint(tiny(family))
    engines.check_tree_equals_sequential(
        lambda count: cut(checkpoint, count), VOCAB, 3, length=90, coalesced=True
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_session_begins_like_another(make: MakeStages, seed: int) -> None:
    engines.check_begins_like_another(make, VOCAB, seed)
    engines.check_begins_as_stored(make, VOCAB, seed)
    engines.check_continues_an_answer(make, VOCAB, seed)


def test_prompt_needs_no_verdict(make: MakeStages) -> None:
    engines.check_prompt_needs_no_verdict(make, VOCAB)


def test_release(make: MakeStages) -> None:
    engines.check_release(make)


def test_wire(make: MakeStages) -> None:
    engines.check_wire(make)


def test_jobs_that_cannot_be_meant(tiny: Callable[..., Path]) -> None:
    first, last = cut(open_checkpoint(tiny("llama")), 2)
    row, segment = Row(0, 0, (0,)), SegmentId(0)
    with pytest.raises(ValueError, match="never admitted"):
        first.run(Forward(SESSION, segment, 0, (row,), tokens=(1,)))
    with pytest.raises(ValueError, match="never admitted"):
        first.run(Compact(SESSION, 0, (0,)))
    for stage in (first, last):
        stage.run(Admit(SESSION, 8, Sampling()))
        with pytest.raises(ValueError, match="already"):
            stage.run(Admit(SESSION, 8, Sampling()))
    for tokens in ((-1,), (10**6,), (1, 2), ()):
        with pytest.raises(ValueError, match="token"):
            first.run(Forward(SESSION, segment, 0, (row,), tokens=tokens))
    with pytest.raises(ValueError, match="last stage"):
        first.run(Forward(SESSION, segment, 0, (row,), tokens=(1,), sampled_rows=(0,)))
    with pytest.raises(ValueError, match="hidden"):
        last.run(Forward(SESSION, segment, 0, (row,), tokens=(1,)))
    hidden = first.run(Forward(SESSION, segment, 0, (row,), tokens=(1,)))
    last.run(Release(SESSION))
    last.run(Admit(SESSION, 8, DRAWS["greedy, penalties"]))
    with pytest.raises(ValueError, match="0 tokens for 1 rows"):
        last.run(
            Forward(SESSION, segment, 0, (row,), hidden=TensorRows(hidden, (0,)), sampled_rows=(0,))
        )
    last.run(Release(SESSION))
    last.run(Admit(SESSION, 8, Sampling()))
    assert isinstance(
        last.run(
            Forward(SESSION, segment, 0, (row,), hidden=TensorRows(hidden, (0,)), sampled_rows=(0,))
        ),
        tuple,
    )
