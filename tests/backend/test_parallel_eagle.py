"""P-EAGLE heads: trees against all products of the formulas' distributions, a whole cluster against
transformers' ``generate``, and what is said of heads that cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from asyncspec.backend.base import SourceSpec
from asyncspec.core.errors import CheckpointError
from asyncspec.core.jobs import Release
from asyncspec.plugins.hf.backend import BACKEND
from asyncspec.plugins.hf.checkpoint.checkpoint import Checkpoint, open_checkpoint, read_tensor
from asyncspec.plugins.hf.heads.eagle.parallel import ParallelEagleSource
from asyncspec_protocol.ids import SessionId
from backend.block_heads import MASK, PlainBlocks
from backend.eagle_growth import ONE, extend, grow
from backend.eagle_heads import HIDDEN, TARGET, Dice, Sizes, State, eagle3, save_speculators
from backend.eagle_reference import PlainHead
from backend.hf_cluster import Loaded
from backend.row_count import count_rows
from backend.test_eagle_cluster import Target, check_on_clusters
from backend.test_eagle_source import PROPOSES, paths
from backend.tiny import VOCAB

pytestmark = pytest.mark.torch

MakeTiny = Callable[..., Path]
LEVELS = 4
SIZES = Sizes(layers=2)


def peagle(**options: Any) -> State:
    return eagle3(SIZES, **options) | {"mask_hidden": Dice(9).normal(1, 1, 3 * HIDDEN)}


def save(directory: Path, state: State, **settings: Any) -> Path:
    reported = {
        "speculators_model_type": "peagle",
        "mask_token_id": MASK,
        "speculators_config": {
            "algorithm": "peagle",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": LEVELS}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "org/other"},
        },
    }
    return save_speculators(directory, state, SIZES, **(reported | settings))


class PlainParallel(PlainBlocks):
    """The rows of one pass, by a full causal pass over all features."""

    levels = LEVELS  # type: ignore[assignment]

    def __init__(self, state: State, embedding: torch.Tensor, lm_head: torch.Tensor) -> None:
        self.plain = PlainHead(state, embedding, lm_head, SIZES)
        self.state = self.plain.state
        # Of the position after each feature.
        self.tokens: list[int] = []

    def rows(self, features: torch.Tensor, token: int) -> torch.Tensor:
        masks, plain = LEVELS - 1, self.plain
        mask = self.state["mask_hidden"].view(1, -1).expand(masks, -1)
        both = plain._normed_features(torch.cat([features.to(plain.dtype), mask]))
        fused = linear(both, self.state["fc.weight"])
        guesses = plain.guesses(fused, [*self.tokens[: len(features)], *[MASK] * masks])
        return plain._norm(guesses[-LEVELS:], "norm")


@pytest.fixture
def target(tiny: MakeTiny) -> Checkpoint:
    return open_checkpoint(tiny("llama", **TARGET))


def load(head: Path, target: Checkpoint) -> ParallelEagleSource:
    source = BACKEND.load_source(SourceSpec(f"eagle:{head}", target)).source
    assert isinstance(source, ParallelEagleSource)
    return source


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({}, {}),
        ({"proposes": PROPOSES}, {"draft_vocab_size": 90, "norm_before_residual": False}),
        ({"norm_before_fc": True}, {"norm_before_fc": True}),
    ],
)
def test_the_tree_is_the_best_of_all_products(
    options: Any, settings: Any, target: Checkpoint, tmp_path: Path
) -> None:
    state = peagle(**options)
    source = load(save(tmp_path / "head", state, **settings), target)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    plain = PlainParallel(state, *(read_tensor(target.tensors[n], torch.float32) for n in names))
    random = Random(3)
    plain.tokens = [random.randrange(VOCAB) for _ in range(40)]
    features = torch.randn(40, 3 * HIDDEN, generator=torch.Generator().manual_seed(7))
    computed, known = count_rows(source), 0
    for end in (30, 31, 31, 34):
        extend(source, features[known:end], plain.tokens[known:end])
        before = computed()
        grown = grow(source, 8, 4, 14)
        assert computed() - before == (LEVELS - 1 if end > known else 0)
        want = plain.best(features[:end], plain.tokens[end - 1], 8, 4, 14)
        got = {tuple(path): score for path, score in zip(paths(grown), grown[2], strict=True)}
        assert got == pytest.approx(want, abs=2e-3)
        source.check()
        known = end
    assert len(grow(source, 2, 60, 70)[1]) == 70
    source.check()


def test_sessions_end_and_begin(tiny: MakeTiny, tmp_path: Path) -> None:
    short = open_checkpoint(tiny("llama", **TARGET, max_position_embeddings=16))
    source = load(save(tmp_path / "head", peagle()), short)
    features = torch.randn(20, 3 * HIDDEN, generator=torch.Generator().manual_seed(7))
    extend(source, features[:13], range(13))
    assert max(map(len, paths(grow(source, 4, 4, 14)))) == 2
    extend(source, features[13:15], range(2))
    assert grow(source, 4, 4, 14) == ((), (), ())
    source.run(Release(ONE))
    extend(source, features[:0], ())
    assert grow(source, 4, 4, 14) == ((), (), ())
    extend(source, features[:1], (5,), SessionId(2))
    assert grow(source, 4, 4, 14, SessionId(2)) != ((), (), ())
    source.check()


@pytest.mark.slow
def test_a_cluster_writes_what_generate_does(target: Checkpoint, tmp_path: Path) -> None:
    source = load(save(tmp_path / "head", peagle()), target)
    check_on_clusters(source, Target(Loaded(target), target, target.path))


REFUSED: dict[str, tuple[State, dict[str, Any], str]] = {
    "mask": (peagle(), {"mask_token_id": None}, "mask_token_id is None"),
    "feature": (eagle3(SIZES), {}, "no tensor mask_hidden"),
    "size": (peagle() | {"mask_hidden": torch.ones(1, 1, HIDDEN)}, {}, "mask_hidden .* shape"),
    "levels": (peagle(), {"speculators_config": {}}, "no speculative_tokens"),
}


@pytest.mark.parametrize(("state", "settings", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_used_is_one_line(
    state: State, settings: Any, said: str, target: Checkpoint, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=said):
        load(save(tmp_path / "head", state, **settings), target)


def test_a_head_of_another_target_is_warned_of(
    target: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(save(tmp_path / "head", peagle()), target)
    assert "was made for org/other" in caplog.text
