"""DFlash and DSpark heads: trees against all products of the formulas' distributions, a whole
cluster against transformers' ``generate``, and what is said of heads that cannot be used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from asyncspec.backend.base import SourceSpec
from asyncspec.core.errors import CheckpointError
from asyncspec.core.jobs import DraftBatch, Release
from asyncspec.plugins.hf.backend import BACKEND
from asyncspec.plugins.hf.checkpoint.checkpoint import Checkpoint, open_checkpoint, read_tensor
from asyncspec.plugins.hf.heads.dflash.head import Context
from asyncspec.plugins.hf.heads.dflash.source import DFlashSource
from asyncspec.plugins.hf.heads.eagle.checkpoint import open_eagle
from asyncspec_protocol.ids import SessionId, Version
from asyncspec_protocol.messages import Expand, Expanded
from backend import block_heads
from backend.block_heads import PlainBlocks, dflash, save_block_speculators, save_zlab
from backend.eagle_growth import ONE, extend, grow
from backend.eagle_heads import HIDDEN, TARGET
from backend.hf_cluster import Loaded
from backend.test_eagle_cluster import Target, check_on_clusters
from backend.test_eagle_source import PROPOSES, paths
from backend.tiny import VOCAB
from effort import nightly

pytestmark = pytest.mark.torch

MakeTiny = Callable[..., Path]
SLIDING = {"model_type": "qwen3", "sliding_window": 9, "layer_types": ["sliding_attention"] * 2}
MIXED = SLIDING | {"layer_types": ["sliding_attention", "full_attention"]}


@dataclass
class Case:
    save: Callable[..., Path] = save_block_speculators
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    windows: tuple[int, int] = (0, 0)


DSPARK: dict[str, Any] = {
    "speculators_model_type": "dspark",
    "sample_from_anchor": True,
    "markov_rank": block_heads.RANK,
}
CASES = {
    "z-lab": Case(save_zlab),
    "speculators": Case(),
    "reduced": Case(options={"proposes": PROPOSES}, settings={"draft_vocab_size": 90}),
    "window": Case(settings={"layer": MIXED}, windows=(9, 0)),
    "window, both ways": Case(
        settings={"layer": SLIDING, "sliding_window_non_causal": True}, windows=(9, 9)
    ),
    "dspark": Case(options={"markov": "vanilla", "confidence": True}, settings=DSPARK),
    "dspark gated": Case(
        options={"markov": "gated", "proposes": PROPOSES},
        settings=DSPARK | {"markov_head_type": "gated", "draft_vocab_size": 90},
    ),
}


@pytest.fixture
def target(tiny: MakeTiny) -> Checkpoint:
    return open_checkpoint(tiny("llama", **TARGET))


def load(head: Path, target: Checkpoint) -> DFlashSource:
    loaded = BACKEND.load_source(SourceSpec(f"eagle:{head}", target))
    assert isinstance(loaded.source, DFlashSource)
    assert loaded.features == block_heads.DEPTHS
    return loaded.source


def both(case: Case, target: Checkpoint, directory: Path) -> tuple[DFlashSource, PlainBlocks]:
    state = dflash(**case.options)
    source = load(case.save(directory, state, **case.settings), target)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    plain = PlainBlocks(state, *(read_tensor(target.tensors[n], torch.float32) for n in names))
    plain.from_anchor = bool(case.settings.get("sample_from_anchor"))
    plain.windows = case.windows
    plain.causal = not case.settings.get("sliding_window_non_causal")
    return source, plain


def text(length: int) -> tuple[torch.Tensor, list[int]]:
    """Features, and the token after each of their positions."""
    random = Random(3)
    width = len(block_heads.DEPTHS) * HIDDEN
    features = torch.randn(length, width, generator=torch.Generator().manual_seed(7))
    return features, [random.randrange(VOCAB) for _ in range(length)]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_tree_is_the_best_of_all_products(
    case: Case, target: Checkpoint, tmp_path: Path
) -> None:
    source, plain = both(case, target, tmp_path / "head")
    features, tokens = text(40)
    known = 0
    for end in (30, 31, 31, 34):
        extend(source, features[known:end], tokens[known:end])
        grown = grow(source, 8, 4, 14)
        want = plain.best(features[:end], tokens[end - 1], 8, 4, 14)
        got = {tuple(path): score for path, score in zip(paths(grown), grown[2], strict=True)}
        assert got.keys() == want.keys()
        assert got == pytest.approx(want, abs=2e-3)
        source.check()
        known = end


def test_a_block_is_one_pass(
    target: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = both(CASES["speculators"], target, tmp_path / "head")
    fill, filled = source.head.fill, list[int]()

    def counted(contexts: Sequence[Context], tokens: Sequence[int]) -> Any:
        filled.extend(tokens)
        return fill(contexts, tokens)

    monkeypatch.setattr(source.head, "fill", counted)
    features, tokens = text(40)
    extend(source, features[:30], tokens[:30])
    first = grow(source, 4, 4, 14)
    assert len(filled) == 1
    assert grow(source, 4, 4, 14) == first
    # From nodes further down, and wider than what was remembered.
    tree = source.run(Expand(ONE, Version(0), 31, (), 1, 60, 60))
    assert isinstance(tree, Expanded)
    assert len(tree.tokens) == 60
    assert len(filled) == 1
    assert max(map(len, paths(grow(source, 9, 1, 9)))) == block_heads.ROWS - 1


def test_sessions_share_passes(target: Checkpoint, tmp_path: Path) -> None:
    source, _ = both(CASES["window"], target, tmp_path / "head")
    features, tokens = text(40)
    one, two = SessionId(1), SessionId(2)
    extend(source, features[:30], tokens[:30], one)
    extend(source, features[:12], tokens[:12], two)
    jobs = (Expand(one, Version(0), 31, (), 4, 4, 14), Expand(two, Version(0), 13, (), 4, 4, 14))
    together = source.run(DraftBatch(jobs))
    assert isinstance(together, tuple)
    for job, tree in zip(jobs, together, strict=True):
        source.run(Release(job.session))
        extend(source, features[: job.base - 1], tokens[: job.base - 1], job.session)
        alone = source.run(job)
        assert isinstance(alone, Expanded)
        assert alone.tokens == tree.tokens
        assert alone.scores == pytest.approx(tree.scores, abs=1e-4)
    source.check()


def test_the_tree_ends_where_the_target_ends(tiny: MakeTiny, tmp_path: Path) -> None:
    short = open_checkpoint(tiny("llama", **TARGET, max_position_embeddings=16))
    source, _ = both(CASES["speculators"], short, tmp_path / "head")
    features, tokens = text(20)
    extend(source, features[:13], tokens[:13])
    assert max(map(len, paths(grow(source, 4, 4, 14)))) == 2
    extend(source, features[13:15], tokens[13:15])
    assert grow(source, 4, 4, 14) == ((), (), ())
    source.run(Release(ONE))
    extend(source, features[:0], ())
    assert grow(source, 4, 4, 14) == ((), (), ())


@pytest.mark.parametrize("case", [nightly("z-lab"), "dspark"])
def test_a_cluster_writes_what_generate_does(case: str, target: Checkpoint, tmp_path: Path) -> None:
    source, _ = both(CASES[case], target, tmp_path / "head")
    check_on_clusters(source, Target(Loaded(target), target, target.path))


NO_NORM = {k: v for k, v in dflash().items() if k != "hidden_norm.weight"}
REFUSED: dict[str, tuple[Callable[..., Path], dict[str, torch.Tensor], dict[str, Any], str]] = {
    "mask": (save_block_speculators, dflash(), {"mask_token_id": None}, "mask_token_id is None"),
    "mask beyond": (save_block_speculators, dflash(), {"mask_token_id": VOCAB}, "below"),
    "block": (save_block_speculators, dflash(), {"block_size": 1}, "block_size is 1"),
    "rnn": (
        save_block_speculators,
        dflash(),
        DSPARK | {"markov_head_type": "rnn"},
        "markov_head_type",
    ),
    "depths": (
        save_block_speculators,
        dflash(),
        {"aux_hidden_state_layer_ids": [2, 4, 9]},
        r"after layers \[2, 4, 9\]; expected ascending, at most 8",
    ),
    "last layer": (
        save_zlab,
        dflash(),
        {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 3, 7]}},
        r"after layers \[2, 4, 8\]; expected ascending, at most 7",
    ),
    "no layers": (save_zlab, dflash(), {"dflash_config": {}}, "no target_layer_ids"),
    "norm": (save_zlab, NO_NORM, {}, "no tensor hidden_norm.weight"),
    "markov": (save_block_speculators, dflash(), DSPARK, "no tensor markov_head.markov_w1.weight"),
    "other": (
        save_zlab,
        dflash() | {"layers.0.self_attn.g_proj.weight": torch.ones(4)},
        {},
        "has a tensor layers.0.self_attn.g_proj.weight",
    ),
    "NaN": (
        save_zlab,
        dflash() | {"norm.weight": torch.full((HIDDEN,), torch.nan)},
        {},
        "norm.weight .* holds NaN",
    ),
    "size": (save_zlab, dflash() | {"fc.weight": torch.ones(HIDDEN, HIDDEN)}, {}, "fc.weight"),
    "window": (
        save_zlab,
        dflash(),
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4},
        "only full attention",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_used_is_one_line(case: Any, target: Checkpoint, tmp_path: Path) -> None:
    save, state, settings, said = case
    head = save(tmp_path / "head", state, **settings)
    with pytest.raises(CheckpointError, match=said) as raised:
        load(head, target)
    assert "\n" not in str(raised.value)


def test_memory_equals_the_reported_footprint(target: Checkpoint, tmp_path: Path) -> None:
    head = save_zlab(tmp_path / "head", dflash())
    said = BACKEND.source_footprint(f"eagle:{head}", str(target.path), "auto")
    loaded = BACKEND.load_source(SourceSpec(f"eagle:{head}", target))
    assert loaded.token_bytes == said.slot
    numbers = sum(t.numel() for t in dflash().values()) + 2 * VOCAB * HIDDEN
    assert said.weights == 4 * numbers
    assert open_eagle(head, target.info).description.block is not None
