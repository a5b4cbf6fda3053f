"""EAGLE heads of every format grow the tree that the formulas give, and compute nothing twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from asyncspec.core.jobs import Feed, Release, TensorRows
from asyncspec.core.tensors import WireTensor
from asyncspec.core.tree import TIP, Grown
from asyncspec.plugins.hf.checkpoint.checkpoint import Checkpoint, open_checkpoint, read_tensor
from asyncspec.plugins.hf.heads.eagle.source import EagleSource, load_eagle
from asyncspec_protocol.ids import SessionId, Version
from asyncspec_protocol.messages import Expand, Expanded
from backend import eagle_heads
from backend.eagle_growth import ONE, extend, grow
from backend.eagle_heads import HEADS, HIDDEN, TARGET, Sizes, State
from backend.eagle_reference import PlainHead
from backend.row_count import count_passes, count_rows
from backend.tiny import VOCAB

pytestmark = pytest.mark.torch

PROPOSES = sorted(Random(5).sample(range(VOCAB), 90))
WIDE = Sizes(hidden=48, heads=6, kv_heads=2, head_dim=24)
"""Narrower than its target, with heads wider than hidden_size / heads."""

TOLERANCE = 1e-3
"""Guesses are fed back without a norm, so they and their rounding grow with depth."""

ROOM = 8
"""How much more than the formulas in float32 a head may be off: it adds up in another order."""

MakeTiny = Callable[..., Path]


@dataclass
class Case:
    """A format."""

    state: Callable[..., State]
    options: dict[str, Any]
    sizes: Sizes | None = None
    settings: dict[str, Any] | None = None
    save: Callable[..., Path] = eagle_heads.save
    theta: float = 10_000.0
    # Columns of a head that are rotated; 0: all.
    rotary: int = 0


CASES = {
    "eagle": Case(eagle_heads.eagle, {}, settings={"bias": True}),
    "eagle-no-bias-key": Case(eagle_heads.eagle, {}),
    "eagle-llama3": Case(
        eagle_heads.eagle,
        {"fc_bias": False},
        settings={"bias": False, "rope_theta": 500000.0, "rope_scaling": None},
        theta=500_000.0,
    ),
    "eagle-qwen2": Case(eagle_heads.eagle, {"qkv_bias": True}, settings={"qkv_bias": True}),
    "eagle-shared-embedding": Case(eagle_heads.eagle, {"embed": False}),
    "eagle-pickled": Case(eagle_heads.eagle, {}, save=eagle_heads.save_pickled),
    "eagle-other-heads": Case(eagle_heads.eagle, {}, sizes=Sizes(heads=2, kv_heads=1, head_dim=32)),
    # Its heads do not divide its width, as no Llama's may.
    "eagle-wide": Case(
        eagle_heads.eagle,
        {},
        sizes=Sizes(heads=6, kv_heads=2, head_dim=24),
        settings={"head_dim": 24},
    ),
    "eagle3": Case(
        eagle_heads.eagle3,
        {"proposes": PROPOSES},
        settings={"draft_vocab_size": 90, "architectures": ["LlamaForCausalLMEagle3"]},
    ),
    "eagle3-pickled": Case(
        eagle_heads.eagle3,
        {"proposes": PROPOSES},
        settings={"draft_vocab_size": 90},
        save=eagle_heads.save_pickled,
    ),
    "eagle3-whole-vocabulary": Case(
        eagle_heads.eagle3, {}, settings={"rope_parameters": {"rope_theta": 1e6}}, theta=1e6
    ),
    "eagle3-own-embedding": Case(
        eagle_heads.eagle3,
        {"proposes": PROPOSES, "embed": True, "reads": HIDDEN},
        sizes=WIDE,
        settings={"draft_vocab_size": 90, "target_hidden_size": HIDDEN},
    ),
    "eagle3-norm-before-residual": Case(
        eagle_heads.eagle3, {}, settings={"norm_before_residual": True}
    ),
    # Many settings are the target's, and mean nothing here.
    "eagle-mixtral": Case(eagle_heads.eagle, {}, settings={"num_local_experts": 8}),
    "eagle-layers": Case(eagle_heads.eagle, {"qkv_bias": True}, sizes=Sizes(layers=2)),
    "eagle-speculators": Case(
        eagle_heads.eagle,
        {"embed": False},
        settings={"speculators_model_type": "eagle", "fusion_bias": True, "layernorms": False},
        save=eagle_heads.save_speculators,
    ),
    "eagle3-layers": Case(eagle_heads.eagle3, {}, sizes=Sizes(layers=3)),
    "eagle3-biases": Case(
        eagle_heads.eagle3,
        {"bias": True, "mlp_bias": True},
        settings={"attention_bias": True, "mlp_bias": True},
    ),
    "eagle3-shared-head": Case(lambda *of, **how: headless(eagle_heads.eagle3(*of, **how)), {}),
    "eagle3-five-depths": Case(
        eagle_heads.eagle3,
        {"depths": 5},
        settings={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 5, 7]}},
    ),
    "eagle3-partial-rotary": Case(
        eagle_heads.eagle3,
        {},
        settings={"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        rotary=HIDDEN // HEADS // 2,
    ),
    "eagle3.1": Case(
        eagle_heads.eagle3, {"fc_norm": True}, settings={"fc_norm": True, "norm_output": True}
    ),
    "eagle3.1-other-names": Case(
        eagle_heads.eagle3,
        {"norm_before_fc": True},
        settings={"eagle_config": {"norm_before_fc": True, "return_hidden_post_norm": True}},
    ),
    "eagle3-speculators": Case(
        eagle_heads.eagle3,
        {"proposes": PROPOSES},
        settings={"draft_vocab_size": 90, "norm_before_residual": True},
        save=eagle_heads.save_speculators,
    ),
    "eagle3-speculators-qwen3": Case(
        eagle_heads.eagle3,
        {"qk_norm": True},
        sizes=Sizes(layers=2),
        settings={"layer": {"model_type": "qwen3", "layer_types": ["full_attention"] * 2}},
        save=eagle_heads.save_speculators,
    ),
    "eagle3-speculators-norm-before-fc": Case(
        eagle_heads.eagle3,
        {"norm_before_fc": True},
        settings={"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [2, 5, 8]},
        save=eagle_heads.save_speculators,
    ),
    "eagle3.1-speculators": Case(
        eagle_heads.eagle3,
        {"fc_norm": True, "proposes": PROPOSES},
        sizes=Sizes(layers=2),
        settings={"fc_norm": True, "norm_output": True, "draft_vocab_size": 90},
        save=eagle_heads.save_speculators,
    ),
}


def headless(state: State) -> State:
    """Without an output head: it is the target's."""
    return {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}


@dataclass
class Twin:
    """The same head twice, and a text for it."""

    source: EagleSource
    plain: PlainHead
    # In float32.
    rough: PlainHead
    features: torch.Tensor
    tokens: list[int]

    def extend(self, start: int, end: int, session: SessionId = ONE) -> None:
        extend(self.source, self.features[start:end], self.tokens[start:end], session)
        self.source.check()

    def grow(
        self, depth: int = 4, width: int = 4, count: int = 14, session: SessionId = ONE
    ) -> Grown:
        grown = grow(self.source, depth, width, count, session)
        self.source.check()
        return grown

    def want(self, end: int, depth: int = 4, width: int = 4, count: int = 14) -> Grown:
        return self.plain.grow(self.features[:end], self.tokens[:end], depth, width, count)

    def room(self, end: int, want: Grown) -> float:
        """How far scores may be from ``self.want(end)``."""
        rough = self.rough.grow(self.features[:end], self.tokens[:end], 4, 4, 14)
        off = max(abs(a - b) for a, b in zip(rough[2], want[2], strict=True))
        return max(TOLERANCE, ROOM * off)


def twin(case: Case, target: Checkpoint, directory: Path) -> Twin:
    state = case.state(case.sizes, **case.options)
    settings = case.settings or {}
    source = load_eagle(case.save(directory, state, case.sizes, **settings), target)
    embedding, lm_head = (
        read_tensor(target.tensors[name], torch.float32)
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    )
    plain, rough = (
        PlainHead(state, embedding, lm_head, case.sizes, case.theta, dtype)
        for dtype in (torch.float64, torch.float32)
    )
    for head in (plain, rough):
        head.norm_before_residual = bool(settings.get("norm_before_residual"))
        head.norm_output = "norm_output" in settings or "return_hidden_post_norm" in str(settings)
        head.rotary = case.rotary or head.sizes.head_dim
    features = torch.randn(120, source.features.width, generator=torch.Generator().manual_seed(7))
    random = Random(3)
    return Twin(source, plain, rough, features, [random.randrange(VOCAB) for _ in range(120)])


@pytest.fixture
def target(tiny: MakeTiny) -> Checkpoint:
    return open_checkpoint(tiny("llama", **TARGET))


@pytest.fixture
def eagle(target: Checkpoint, tmp_path: Path) -> Twin:
    return twin(CASES["eagle"], target, tmp_path / "head")


def same(got: Grown, want: Grown, room: float = TOLERANCE) -> None:
    assert paths(got) == paths(want)
    assert got[2] == pytest.approx(want[2], abs=room)


def paths(grown: Grown) -> list[list[int]]:
    found: list[list[int]] = []
    for parent, token in zip(grown[0], grown[1], strict=True):
        found.append([*(found[parent] if parent >= 0 else []), token])
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_tree_is_that_of_the_formulas(case: Case, target: Checkpoint, tmp_path: Path) -> None:
    both = twin(case, target, tmp_path / "head")
    known = 0
    for end in (40, 41, 41, 44, 45):
        both.extend(known, end)
        want = both.want(end)
        same(both.grow(), want, both.room(end, want))
        known = end


def test_a_random_walk(eagle: Twin) -> None:
    """The text follows the tree for a while, or leaves it; trees of many shapes."""
    random = Random(1)
    known = 0
    for _ in range(8):
        more = random.randint(0 if known else 1, 9)
        eagle.extend(known, known + more)
        known += more
        for _ in range(random.randint(1, 2)):
            shape = random.randint(1, 5), random.randint(1, 6), random.randint(1, 20)
            grown = eagle.grow(*shape)
            same(grown, eagle.want(known, *shape))
        longest = max(paths(grown), key=len)
        eagle.tokens[known : known + len(longest)] = longest


def test_nothing_is_computed_twice(eagle: Twin) -> None:
    computed = count_rows(eagle.source)
    eagle.extend(0, 100)
    assert computed() == 100
    first = eagle.grow(4, 4, 12)
    drafted = computed() - 100
    assert drafted == 3 * 4  # the tip's own successors are known
    assert eagle.grow(4, 4, 12) == first
    eagle.grow(2, 3, 5)
    eagle.extend(100, 100)
    assert computed() == 100 + drafted
    eagle.grow(5, 4, 12)
    assert computed() == 100 + drafted + 4


def test_true_features_replace_guesses(eagle: Twin) -> None:
    """A drafted token that comes true is computed again, from its true feature, and only it."""
    computed = count_rows(eagle.source)
    eagle.extend(0, 100)
    grown = eagle.grow()
    before = computed()
    eagle.tokens[100] = grown[1][0]
    eagle.extend(100, 101)
    assert computed() == before + 1
    assert eagle.source.known(ONE) == 102
    same(eagle.grow(), eagle.want(101))


def test_a_tree_that_continues_is_not_predicted_again(eagle: Twin) -> None:
    """Below a leaf only what is new is computed, in a pass a level; below the tip all is, from true
    features."""
    computed, passes = count_rows(eagle.source), count_passes(eagle.source)
    eagle.extend(0, 100)
    parents, tokens, scores = eagle.grow(4, 4, 30)
    leaf = max(range(len(tokens)), key=lambda node: len(paths((parents, tokens, scores))[node]))
    path = [leaf]
    while parents[path[0]] != TIP:
        path.insert(0, parents[path[0]])
    below = [tokens[node] for node in path]
    eagle.tokens[100:101] = below[:1]
    before = computed(), passes()
    eagle.source.run(Feed(ONE, 100, (TensorRows(eagle.features, (100,)),)))
    deeper = Expand(
        *(ONE, Version(0), 101, (below[0],), 2, 1, 2),
        parents=(TIP, *range(len(below) - 2)),
        tokens=tuple(below[1:]),
        scores=tuple(scores[node] for node in path[1:]),
        frontier=(len(below) - 2,),
    )
    grown = eagle.source.run(deeper)
    eagle.source.check()
    assert isinstance(grown, Expanded)
    assert [len(p) for p in paths((grown.parents, grown.tokens, grown.scores))] == [1, 2, 3, 4, 5]
    # The committed row beside the leaf, and the leaf's child.
    assert (computed(), passes()) == (before[0] + 3, before[1] + 2)
    same(eagle.grow(), eagle.want(101))


def test_sessions_are_apart(eagle: Twin) -> None:
    eagle.extend(0, 40, SessionId(1))
    eagle.extend(0, 20, SessionId(2))
    same(eagle.grow(session=SessionId(1)), eagle.want(40))
    same(eagle.grow(session=SessionId(2)), eagle.want(20))
    eagle.source.release(SessionId(1))
    eagle.source.release(SessionId(1))
    same(eagle.grow(session=SessionId(2)), eagle.want(20))
    assert (eagle.source.known(SessionId(1)), eagle.source.known(SessionId(2))) == (0, 21)
    assert eagle.grow(session=SessionId(1)) == ((), (), ())


def test_a_wider_question_than_before(eagle: Twin) -> None:
    computed = count_rows(eagle.source)
    eagle.extend(0, 20)
    eagle.grow()
    rows = computed()
    same(eagle.grow(1, 50, 50), eagle.want(20, 1, 50, 50))
    assert sorted(eagle.grow(1, 10_000, 10_000)[1]) == list(range(VOCAB))
    assert computed() == rows


def test_proposals_come_from_the_reduced_vocabulary(target: Checkpoint, tmp_path: Path) -> None:
    both = twin(CASES["eagle3"], target, tmp_path / "head")
    both.extend(0, 20)
    assert sorted(both.grow(1, 1000, 1000)[1]) == PROPOSES


def test_the_tree_ends_where_the_target_ends(tiny: MakeTiny, tmp_path: Path) -> None:
    short = open_checkpoint(tiny("llama", **TARGET, max_position_embeddings=16))
    both = twin(CASES["eagle"], short, tmp_path / "head")
    both.extend(0, 13)
    assert max(map(len, paths(both.grow()))) == 2
    both.extend(13, 15)
    assert both.grow() == ((), (), ())


def test_rows_that_do_not_fit(eagle: Twin) -> None:
    for features in (torch.zeros(1, HIDDEN), torch.zeros(2, HIDDEN + 1)):
        with pytest.raises(ValueError, match="features of shape"):
            extend(eagle.source, features, [1, 2])
        eagle.source.release(ONE)
    for token in (-1, VOCAB):
        with pytest.raises(ValueError, match="vocabulary"):
            extend(eagle.source, torch.zeros(1, HIDDEN), [token])
        eagle.source.release(ONE)
    assert eagle.source.known(ONE) == 0


def ask(both: Twin, base: int, committed: Sequence[int]) -> Expanded:
    start, end = max(base, 1) - 1, base + len(committed) - 1
    if end > start:
        rows = TensorRows(both.features, tuple(range(start, end)))
        assert both.source.run(Feed(ONE, start, (rows,))) is None
    expanded = both.source.run(Expand(ONE, Version(7), base, tuple(committed), 4, 4, 14))
    assert isinstance(expanded, Expanded)
    return expanded


def test_as_a_token_source(eagle: Twin) -> None:
    """Run as a draft model is: the text with its first token, which has no row."""
    text = [9, *eagle.tokens]
    assert ask(eagle, 0, ()).tokens == ()
    expanded = ask(eagle, 0, text[:51])
    assert (expanded.base, expanded.version) == (51, 7)
    same((expanded.parents, expanded.tokens, expanded.scores), eagle.want(50))
    assert ask(eagle, 51, ()).tokens == expanded.tokens
    expanded = ask(eagle, 51, text[51:54])
    same((expanded.parents, expanded.tokens, expanded.scores), eagle.want(53))
    with pytest.raises(ValueError, match="knows 54 tokens, not 51"):
        eagle.source.run(Expand(ONE, Version(7), 51, tuple(text[51:54]), 4, 4, 14))
    with pytest.raises(ValueError, match="from position 50 on, 53 are known"):
        ask(eagle, 51, text[51:54])
    with pytest.raises(ValueError, match="features of shape"):
        eagle.source.run(Expand(ONE, Version(7), 54, tuple(text[54:55]), 4, 4, 14))
    assert eagle.source.run(Release(ONE)) is None
    assert ask(eagle, 0, text[:1]).tokens == ()
    assert ask(eagle, 1, text[1:11]).base == 11


def test_features_may_come_before_their_tokens(eagle: Twin) -> None:
    """Fed piece by piece, asked in other pieces; what is not taken yet goes with its session."""
    text = [9, *eagle.tokens]
    for start, end in ((0, 7), (7, 8), (8, 40)):
        eagle.source.run(Feed(ONE, start, (TensorRows(eagle.features, tuple(range(start, end))),)))
    for base, end in ((0, 5), (5, 6), (6, 41)):
        expanded = eagle.source.run(Expand(ONE, Version(1), base, tuple(text[base:end]), 4, 4, 14))
    assert expanded is not None
    same((expanded.parents, expanded.tokens, expanded.scores), eagle.want(40))
    eagle.source.run(Feed(ONE, 40, (TensorRows(eagle.features, (40, 41)),)))
    eagle.source.run(Release(ONE))
    eagle.source.run(Feed(ONE, 0, (TensorRows(eagle.features, (0,)),)))
    assert eagle.source.known(ONE) == 0


def test_features_as_they_come_from_the_wire(eagle: Twin) -> None:
    wire = eagle.source.pack(TensorRows(eagle.features, (3, 5)))
    found = eagle.source.unpack(wire)
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, eagle.features[[3, 5]])
    for wrong in (("bfloat16", wire.shape), (wire.dtype, (2, 1, HIDDEN)), (wire.dtype, (4, 32))):
        with pytest.raises(ValueError, match="hidden states of"):
            eagle.source.unpack(WireTensor(*wrong, wire.data))


def test_bfloat16(tiny: MakeTiny, tmp_path: Path) -> None:
    """A bfloat16 target makes a bfloat16 head; the best successor is among the best."""
    coarse = open_checkpoint(tiny("llama", **TARGET, dtype=torch.bfloat16))
    both = twin(CASES["eagle3"], coarse, tmp_path / "head")
    assert both.source.head.dtype == torch.bfloat16
    both.extend(0, 40)
    best = both.grow()[1][0]
    want = both.plain.log_probs(both.features[:40], both.tokens[:40], [])
    assert best in both.plain.ids[want.topk(4).indices].tolist()
