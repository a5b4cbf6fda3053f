"""SpecPipe 3.4: other tokens than the target's, never by surprise."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.accept import TargetOutput
from asyncspec.core.tree import TokenTree, new_tree
from asyncspec.plugins.toy.model import ToyModel
from asyncspec.policy.base import Policy
from asyncspec.policy.level_tree import LevelTree, relaxed, within_top_p
from asyncspec.policy.registry import POLICIES, lossless
from asyncspec.testing.policies import add_child
from asyncspec_protocol.ids import NodeId
from cluster import Cluster, ask
from laws import Shaken, check_empty, watch_invariants

ROOT = NodeId(0)
VOCAB = 8
SMALL: dict[str, Policy] = {
    "lossy-relaxed": LevelTree(width=4, children=3, lossy="relaxed"),
    "lossy-top-p": LevelTree(width=4, children=3, lossy="top-p", top_p=0.5),
    "lossless": LevelTree(width=4, children=3),
}


def below(scores: dict[int, float]) -> TokenTree:
    """A root with children by token."""
    tree = new_tree(ROOT, 0, 3)
    for i, (token, score) in enumerate(scores.items()):
        tree = add_child(tree, NodeId(i + 1), ROOT, token, score)
    return tree


@st.composite
def outputs(draw: st.DrawFn) -> TargetOutput:
    tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=VOCAB, unique=True))
    weights = sorted((draw(st.floats(0.01, 1)) for _ in tokens), reverse=True)
    log_probs = tuple(math.log(w / (sum(weights) + draw(st.floats(0, 1)))) for w in weights)
    return TargetOutput(draw(st.sampled_from(tokens)), tuple(tokens), log_probs)


children = st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 0), max_size=5)


@given(children, outputs())
def test_relaxed_takes_the_child_the_target_likes_best(
    scores: dict[int, float], output: TargetOutput
) -> None:
    token = relaxed(below(scores), ROOT, output)
    if not scores:
        assert token == output.token
        return
    listed = [t for t in output.top_tokens if t in scores]
    assert token == (listed[0] if listed else max(scores, key=lambda t: scores[t]))


@given(children, outputs(), st.floats(0.05, 1))
def test_top_p_takes_the_best_drafted_child_of_those_the_target_might_have_drawn(
    scores: dict[int, float], output: TargetOutput, top_p: float
) -> None:
    token = within_top_p(below(scores), ROOT, output, top_p)
    masses = [math.exp(p) for p in output.top_log_probs]
    allowed = {t for i, t in enumerate(output.top_tokens) if sum(masses[:i]) < top_p}
    inside = {t: s for t, s in scores.items() if t in allowed}
    assert token in inside or (token == output.token and not inside)
    if inside:
        assert scores[token] == max(inside.values())


@pytest.mark.parametrize("policy", SMALL)
@pytest.mark.parametrize("stages", [1, 3])
def test_lossy_policies_on_the_machines(policy: str, stages: int) -> None:
    """They end, free everything, say what they are, and miss less often; the lossless one is the
    reference decoder's word for word."""
    misses, lossless = 0.0, 0.0
    for seed in range(4):
        model = ToyModel(vocab=VOCAB, seed=seed)
        for name in (policy, "lossless"):
            cluster = Cluster(
                Shaken([1, 0, 2, 1]), stages=stages, model=model, policies=SMALL, top=0.4
            )
            watch_invariants(cluster)
            request = ask(policy=name, max_new_tokens=40)
            cluster.submit(request)
            cluster.world.run(until=100_000.0)
            check_empty(cluster)
            stats = cluster.world.finished[0].stats
            assert stats["new_tokens"] == 40
            assert ("lossy" in stats) == name.startswith("lossy-")
            if name == "lossless":
                lossless += stats["misses"]
                assert tuple(cluster.world.tokens[0]) == cluster.expected(request)
            else:
                misses += stats["misses"]
    if policy != "lossless":
        assert misses < lossless


def test_names_say_what_is_lossy() -> None:
    for name, policy in POLICIES.items():
        assert name.startswith("lossy-") == bool(policy.top_logprobs) == (name not in lossless())
