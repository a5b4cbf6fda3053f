"""Log-probabilities of prompts: those of the target alone, however the prompt is read."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.core.machine import Emit, Request
from asyncspec.plugins.toy.model import ToyModel
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import PromptLogprobs
from cluster import Cluster
from effort import examples
from laws import check_after, clusters, lose_links, requests

BOUND = 100_000.0

Parts = list[tuple[PromptLogprobs, ...]]


def listen(cluster: Cluster) -> dict[int, Parts]:
    """What every ``Emit`` has of a prompt, by request, as they come."""
    received: dict[int, Parts] = {}

    def watch(rank: Rank, event: Any, effects: tuple[Any, ...]) -> None:
        for effect in effects:
            if isinstance(effect, Emit):
                received.setdefault(effect.request, []).append(effect.prompt_logprobs)

    cluster.world.watch = watch
    return received


def reference(model: ToyModel, prompt: tuple[int, ...], top: int) -> PromptLogprobs:
    """What the model alone says of each prompt token but the first."""
    state, rows = model.start(), []
    for token in prompt[:-1]:
        state = model.extend(state, token)
        rows.append(model.logits([state.hidden])[0])
    scores = [row - np.logaddexp.reduce(row) for row in map(np.float64, rows)]
    best = [np.argsort(-row, kind="stable")[:top] for row in scores]
    pairs = list(zip(scores, prompt[1:], strict=True))
    return PromptLogprobs(
        tuple(float(row[token]) for row, token in pairs),
        tuple(1 + int((row > row[token]).sum()) for row, token in pairs),
        tuple(int(token) for tokens in best for token in tokens),
        tuple(float(row[t]) for row, ts in zip(scores, best, strict=True) for t in ts),
    )


def joined(parts: tuple[PromptLogprobs, ...]) -> PromptLogprobs:
    whole = (
        tuple(value for part in parts for value in getattr(part, name))
        for name in PromptLogprobs.__struct_fields__
    )
    return PromptLogprobs(*whole)


@settings(max_examples=examples(200, quick=60))
@given(
    clusters(),
    requests(3),
    st.lists(st.integers(-1, 4), min_size=3, max_size=3),
    st.lists(st.booleans(), min_size=3, max_size=3),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 4)), max_size=2),
)
def test_prompts_are_scored_as_by_the_target_alone(
    cluster: Cluster,
    asked: list[Request],
    counts: list[int],
    alone: list[bool],
    losses: list[tuple[int, int]],
) -> None:
    """Under any delays and losses, beside requests that share prefixes: once, before the answer,
    which may have no tokens at all."""
    asked = [
        replace(
            request,
            prompt_logprobs=top,
            max_new_tokens=0 if top >= 0 and prompt_only else request.max_new_tokens,
        )
        for request, top, prompt_only in zip(asked, counts, alone, strict=False)
    ]
    received = listen(cluster)
    for request in asked:
        cluster.submit(request)
    lose_links(cluster, losses)
    cluster.world.run(until=BOUND)
    check_after(cluster, asked)
    for request in asked:
        first, *rest = received[request.request]
        assert not any(rest)
        top = request.prompt_logprobs
        if top < 0 or len(request.prompt) == 1:
            assert not first
            continue
        said, want = joined(first), reference(cluster.model, request.prompt, top)
        assert (said.ranks, said.top_tokens) == (want.ranks, want.top_tokens)
        np.testing.assert_allclose(said.log_probs, want.log_probs, atol=1e-5)
        np.testing.assert_allclose(said.top_log_probs, want.top_log_probs, atol=1e-5)
