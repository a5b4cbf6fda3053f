"""Hidden states that users request: those of the target alone, however it is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.core.machine import Emit, Request
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import FINAL
from cluster import Cluster
from effort import examples
from laws import check_after, clusters, lose_links, requests

BOUND = 100_000.0

DEPTHS = [(), (FINAL,), (2,), (0, 2, 4, FINAL), (1, 3, FINAL)]


def listen(cluster: Cluster) -> dict[int, list[bytes]]:
    """Rows by request, as a client keeps them."""
    received: dict[int, list[bytes]] = {}

    def watch(rank: Rank, event: Any, effects: Sequence[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Emit) and effect.features is not None:
                assert not effect.tokens
                tensors: Any = cluster.world.actors[rank].tensors
                tensor = tensors.pack(effect.features)
                rows, size = received.setdefault(effect.request, []), 8 * tensor.shape[1]
                assert effect.features_start <= len(rows)
                del rows[effect.features_start :]
                data = bytes(tensor.data)
                rows += [data[at : at + size] for at in range(0, len(data), size)]

    cluster.world.watch = watch
    return received


def expected(cluster: Cluster, request: Request) -> list[bytes]:
    """What the target computes of all tokens but the last."""
    state, rows = cluster.model.start(), []
    for token in (*request.prompt, *cluster.expected(request))[:-1]:
        state = cluster.model.extend(state, token)
        rows.append(cluster.model.feature(state, request.features))
    return rows


@settings(max_examples=examples(120, quick=20))
@given(
    clusters(),
    requests(4),
    st.lists(st.sampled_from(DEPTHS), min_size=4, max_size=4),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 4)), max_size=2),
)
def test_features_are_those_of_the_target_alone(
    cluster: Cluster,
    asked: list[Request],
    depths: list[tuple[int, ...]],
    losses: list[tuple[int, int]],
) -> None:
    """Under any delays and losses, beside requests that draft with other features and share
    prefixes."""
    asked = [
        replace(request, features=wanted, policy="autoregressive" if wanted else request.policy)
        for request, wanted in zip(asked, depths, strict=False)
    ]
    received = listen(cluster)
    for request in asked:
        cluster.submit(request)
    lose_links(cluster, losses)
    cluster.world.run(until=BOUND)
    check_after(cluster, asked)
    for request in asked:
        want = expected(cluster, request) if request.features else []
        assert received.get(request.request, []) == want
