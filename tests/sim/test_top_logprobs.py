"""Log-probabilities: beside every token stands what the target alone would have said there."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.backend import sampling
from asyncspec.core.accept import TargetOutput
from asyncspec.core.machine import Emit, Request
from asyncspec_protocol.ids import Rank
from cluster import Cluster
from effort import examples
from laws import check_after, clusters, lose_links, requests

BOUND = 100_000.0


def listen(cluster: Cluster) -> dict[int, list[tuple[int, TargetOutput]]]:
    """Every emitted token with its target output, by request, as they come."""
    received: dict[int, list[tuple[int, TargetOutput]]] = {}

    def watch(rank: Rank, event: Any, effects: tuple[Any, ...]) -> None:
        for effect in effects:
            if isinstance(effect, Emit):
                # Either for all of them or for none.
                assert len(effect.outputs) in (0, len(effect.tokens))
                pairs = zip(effect.tokens, effect.outputs, strict=False)
                received.setdefault(effect.request, []).extend(pairs)

    cluster.world.watch = watch
    return received


@settings(max_examples=examples(200, quick=80))
@given(
    clusters(),
    requests(3),
    st.lists(st.integers(0, 5), min_size=3, max_size=3),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 4)), max_size=2),
)
def test_log_probs_of_tokens_are_those_of_the_target_alone(
    cluster: Cluster, asked: list[Request], counts: list[int], losses: list[tuple[int, int]]
) -> None:
    """Under any delays and losses, for requests that ask for it beside others that do not."""
    asked = [
        replace(request, log_probs=wanted > 0, top_logprobs=max(0, wanted - 1))
        for request, wanted in zip(asked, counts, strict=False)
    ]
    received = listen(cluster)
    for request in asked:
        cluster.submit(request)
    lose_links(cluster, losses)
    cluster.world.run(until=BOUND)
    check_after(cluster, asked)
    for request in asked:
        said = received.get(request.request, [])
        assert len(said) == (len(cluster.world.tokens[request.request]) if request.log_probs else 0)
        state = cluster.model.read(request.prompt)
        for token, output in said:
            logits = cluster.model.logits([state.hidden])
            assert output.log_prob_of(token) == sampling.log_probs_of(logits, [token])[0]
            most = request.top_logprobs
            ((best, log_probs),) = sampling.best_successors(logits, most)
            assert (output.top_tokens, output.top_log_probs) == (tuple(best), tuple(log_probs))
            state = cluster.model.extend(state, token)


@pytest.mark.parametrize("token", [4, 5, 9])
def test_a_token_that_was_not_drawn(token: int) -> None:
    output = TargetOutput(4, (5, 6), (-0.5, -1.5), -2.5)
    assert output.log_prob_of(token) == {4: -2.5, 5: -0.5, 9: None}[token]
