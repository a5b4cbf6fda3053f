"""Under every policy the first tokens have the target's own distribution, each and jointly.

The laws compare with a decoder that draws by the same noise; this looks at what is drawn. Seeds are
fixed, so a test that has passed always will.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from itertools import product, starmap
from typing import Any

import pytest
from msgspec.structs import replace

from asyncspec.backend import sampling
from asyncspec.backend.sampling import Floats, Tokens, gumbels
from asyncspec.core import tree as trees
from asyncspec.core.accept import TargetOutput, Walk
from asyncspec.core.sampling import Sampling, seen
from asyncspec.core.tree import TokenTree
from asyncspec.plugins.toy.model import ToyModel
from asyncspec.policy.registry import lossless
from asyncspec_nodes.roles.draft import verdicts
from asyncspec_protocol.ids import NodeId
from cluster import Cluster, ask
from costs import UnitCosts
from effort import nightly
from laws import SMALL
from sampling_reference import kept, penalised

# More tokens than most policies give a node children, so that there are hits and misses.
MODEL = ToyModel(layers=2, vocab=16, seed=3)
PROMPT = (1, 2)
TOKENS = 3
SEEDS = 700
FEWER = 350
"""Seeds by which a wrong draw is noticed."""

SETTINGS = {
    "T=1": Sampling(1.0),
    "top-p": Sampling(1.0, top_p=0.9),
    "top-k, min-p": Sampling(0.7, top_k=14, min_p=0.15),
    "penalties": Sampling(
        1.2, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3, top_p=0.95
    ),
}

Text = tuple[int, ...]

# All of three tokens would be too many cells for the number of seeds.
VIEWS: tuple[Callable[[Text], Text], ...] = (
    *(lambda answer, i=i: (answer[i],) for i in range(TOKENS)),  # type: ignore[misc]
    lambda answer: tuple(token % 4 for token in answer),
)


@functools.cache
def exact(how: Sampling, text: Text = PROMPT) -> dict[Text, float]:
    """The chance of every answer."""
    if len(text) == len(PROMPT) + TOKENS:
        return {text[len(PROMPT) :]: 1.0}
    before = seen(text, len(PROMPT))
    logits = penalised(MODEL.logits([MODEL.read(text).hidden])[0].tolist(), before, how)
    weights = {token: math.exp(score) for token, score in kept(logits, how).items()}
    total = sum(weights.values())
    return {
        answer: chance * weight / total
        for token, weight in weights.items()
        for answer, chance in exact(how, (*text, token)).items()
    }


def answers(policy: str, how: Sampling, seeds: int = SEEDS) -> Counter[Text]:
    """What the cluster writes with one seed after another."""
    cluster = Cluster(UnitCosts(), stages=2, model=MODEL, top=0.7, policies=SMALL)
    found: Counter[Text] = Counter()
    hits = 0.0
    for seed in range(seeds):
        sampling = replace(how, seed=seed)
        cluster.submit(
            ask(seed, prompt=PROMPT, max_new_tokens=TOKENS, policy=policy, sampling=sampling)
        )
        cluster.world.run()
        found[tuple(cluster.world.tokens.pop(seed))] += 1
        hits += cluster.world.finished.pop(seed).stats["hit_rate"]
    assert (hits > seeds / 50) == SMALL[policy].uses_draft, "without hits nothing is tested"
    return found


def fits(found: Counter[Text], chances: dict[Text, float]) -> bool:
    """True where no view of the answers differs from what it should be."""
    possible = found.keys() <= chances.keys()
    return possible and all(pearson(seen_as(found, v), seen_as(chances, v)) for v in VIEWS)


def seen_as(answers: Mapping[Text, float], view: Callable[[Text], Text]) -> dict[Text, float]:
    """The weights of answers, added up where the view is the same."""
    weights: dict[Text, float] = defaultdict(float)
    for answer, weight in answers.items():
        weights[view(answer)] += weight
    return weights


def pearson(found: dict[Text, float], chances: dict[Text, float]) -> bool:
    """The chi-square test at a level of one in 10,000. What is rare counts as one."""
    seeds = sum(found.values())
    cells: list[tuple[float, float]] = []
    rare = (0.0, 0.0)
    for answer, chance in chances.items():
        cell = (chance * seeds, found.get(answer, 0.0))
        if cell[0] < 5:
            rare = (rare[0] + cell[0], rare[1] + cell[1])
        else:
            cells.append(cell)
    cells += [rare] if rare[0] else []
    chi_square = sum((count - expected) ** 2 / expected for expected, count in cells)
    freedom = len(cells) - 1
    # Wilson and Hilferty's approximation.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    return chi_square < limit


# The laws hold every policy against the sequential decoder, seed by seed and with all settings:
# every fourth one, each with one of them, shows here that what they agree on is the target's
# distribution.
def case(policy: int, setting: int) -> Any:
    """By their places in the lists."""
    names = lossless()[policy], list(SETTINGS)[setting]
    if policy % 4 or policy // 2 % len(SETTINGS) != setting:
        return nightly(*names)
    return names


CASES = list(starmap(case, product(range(len(lossless())), range(len(SETTINGS)))))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("policy", "settings"), CASES)
def test_the_first_tokens_have_the_targets_distribution(policy: str, settings: str) -> None:
    how = SETTINGS[settings]
    assert fits(answers(policy, how), exact(how))


def conditioned_on_acceptance(
    tree: TokenTree, verified: Mapping[NodeId, TargetOutput], choose: Any
) -> Walk:
    """Where the drawn token is no node of the tree, a node is taken in its place."""
    accepted: list[NodeId] = []
    node = tree.root
    while (output := verified.get(node)) is not None:
        token = choose(tree, node, output)
        others = [n for n in verified if n in tree and tree.nodes[n].parent == node]
        below = trees.child(tree, node, token)
        if below is None and not others:
            return Walk(tuple(accepted), token)
        node = others[token % len(others)] if below is None else below
        accepted.append(node)
    return Walk(tuple(accepted), None)


def one_noise_for_all(seed: int, position: int, tokens: Tokens) -> Floats:
    """Each token alone is right, but they are not independent."""
    return gumbels(seed, 0, tokens)


def every_second_seed_greedy(seed: int, position: int, tokens: Tokens) -> Floats:
    """Every answer is possible, and the likely ones are too likely."""
    return gumbels(seed, position, tokens) * (seed % 2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("target", "name", "wrong"),
    [
        (verdicts, "walk", conditioned_on_acceptance),
        (sampling, "gumbels", one_noise_for_all),
        (sampling, "gumbels", every_second_seed_greedy),
    ],
)
def test_a_wrong_draw_is_noticed(
    monkeypatch: pytest.MonkeyPatch, target: Any, name: str, wrong: Any
) -> None:
    monkeypatch.setattr(target, name, wrong)
    assert not fits(answers("flowspec", SETTINGS["T=1"], FEWER), exact(SETTINGS["T=1"]))
