"""The laws on a few fixed schedules: losses, penalties, features and shared prompts in one run.

Hypothesis finds what nobody thought of; these are there to fail within a second.
"""

from __future__ import annotations

from functools import partial

import pytest
from msgspec.structs import replace

from asyncspec.core.machine import Submitted
from asyncspec.core.sampling import Sampling
from asyncspec_protocol.ids import DRAFT, Rank
from cluster import Cluster, ask
from laws import FEATURES, SMALL, Shaken, check_after, lose_links, watch_invariants

DELAYS = ([1], [3, 1, 0, 2], [0, 5, 1, 1, 7, 2], [2, 9, 0, 0, 1, 4, 3])
PENALISED = Sampling(0.5, presence_penalty=-1.0, frequency_penalty=0.9)
PROMPT = (1, 2, 3, 4, 5, 6)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("losses", [(), ((25, 0), (70, 1), (71, 0))], ids=["whole", "cut"])
def test_texts_are_exact_and_nothing_is_left(
    seed: int, losses: tuple[tuple[int, int], ...]
) -> None:
    cluster = Cluster(
        Shaken(list(DELAYS[seed])),
        stages=1 + seed % 3,
        policies=SMALL,
        top=0.7,
        features=FEATURES[seed],
        min_common_prefix=3,
        slots=(0, 250)[seed % 2],
        prefill_rows=3,
    )
    watch_invariants(cluster)
    asked = [
        ask(0, prompt=PROMPT, max_new_tokens=30),
        ask(1, prompt=(*PROMPT, 7), max_new_tokens=20, policy="pruned"),
        ask(2, prompt=(5, 5), sampling=replace(PENALISED, seed=seed)),
        ask(3, prompt=PROMPT[:5], policy="specpipe", stop_tokens=frozenset({3})),
    ]
    for number, request in enumerate(asked):
        cluster.world.at(20 * number, cluster.world.feed, DRAFT, Submitted(request))
    lose_links(cluster, losses)
    cluster.world.run(until=50_000.0, most_steps=20_000)
    check_after(cluster, asked)


def test_an_answer_ends_while_a_stage_is_away() -> None:
    """Its account never comes, and nobody waits for it."""
    cluster = Cluster(Shaken([1]), stages=2, policies=SMALL, stats_seconds=1e6)
    request = ask(0, max_new_tokens=6)
    cluster.submit(request)
    world, cut = cluster.world, partial(cluster.world.cut, DRAFT, Rank(2))

    def watch(*_: object) -> None:
        if cluster.state(DRAFT).finishing:
            world.watch = None
            world.at(world.now, cut)

    world.watch = watch
    world.run(until=1000.0, most_steps=20_000)
    assert world.finished[0].reason == "length"
    assert tuple(world.tokens[0]) == cluster.expected(request)
