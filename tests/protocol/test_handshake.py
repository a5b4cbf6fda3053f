"""Who may work with whom; a refusal says which side must change."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import asdict, replace

from actor.local_cluster import hello
from asyncspec_protocol.ids import draft_rank
from asyncspec_protocol.links import answer, client_hello
from asyncspec_protocol.messages import Fault, Welcome

ME = hello(2, 3)


def test_neighbours_and_the_draft_node_are_welcome() -> None:
    for rank in (0, 1, 3):
        reply = answer(ME, hello(rank, 3))
        assert isinstance(reply, Welcome)
        assert (reply.rank, reply.layers) == (ME.rank, ME.layers)
        assert isinstance(answer(hello(rank, 3), reply), Welcome)


def test_any_draft_node_is_welcome_at_a_stage_and_at_no_other_draft_node() -> None:
    for number in (1, 7, 1023):
        rank = draft_rank(number)
        reply = answer(ME, hello(rank, 3))
        assert isinstance(reply, Welcome)
        assert isinstance(answer(hello(rank, 3), reply), Welcome)
        for other in (0, draft_rank(5)):
            refusal = answer(hello(other, 3), hello(rank, 3))
            assert isinstance(refusal, Fault)
            assert "draft nodes are linked to stages, not to each other" in refusal.text


def test_a_client_needs_only_the_cluster() -> None:
    assert isinstance(answer(hello(0, 3), client_hello("toy")), Welcome)
    assert isinstance(answer(hello(0, 3), client_hello("other")), Fault)


def test_a_client_without_a_name_takes_any_cluster_and_learns_its_name() -> None:
    reply = answer(hello(0, 3), client_hello())
    assert isinstance(reply, Welcome)
    assert reply.cluster == "toy"
    assert client_hello() == client_hello("")


@pytest.mark.parametrize("rank", [0, 1, 3, 4, draft_rank(7)])
def test_no_node_is_without_a_name(rank: int) -> None:
    """Neither side of a link between nodes, nor one that answers as if it were a client."""
    nameless = hello(rank, 3, cluster="")
    for reply in (answer(ME, nameless), answer(nameless, ME)):
        assert isinstance(reply, Fault)
        assert "the same [cluster] name" in reply.text
    as_client = Welcome(**asdict(client_hello()))
    assert isinstance(answer(hello(0, 3), as_client), Fault)


def test_a_client_may_not_bear_a_rank() -> None:
    """It would be served by rank: a stranger could pass for a stage."""
    reply = answer(hello(0, 3), replace(client_hello("toy"), rank=1))
    assert isinstance(reply, Fault)
    assert "clients say -1" in reply.text


@pytest.mark.parametrize(
    ("rank", "changes", "sentence"),
    [
        (1, {"protocol": 2}, "upgrade the older side, the node"),
        (1, {"protocol": 0}, "upgrade the older side, the peer"),
        (1, {"cluster": "work"}, "the same [cluster] name"),
        (1, {"rank": 2}, "rank 2 does not fit here"),
        (1, {"rank": 9}, "rank 9 does not fit here"),
        (1, {"role": "draft"}, "rank 0 drafts, 1 to 3 verify"),
        (1, {"stages": 4}, "use one file"),
        (1, {"fingerprint": "else"}, "the same checkpoint"),
        (1, {"fingerprint": "hub:toy"}, "one of rank 1 and rank 2 has the target from the Hub by"),
        (1, {"fingerprint": "gguf:1"}, "one of rank 1 and rank 2 has the target as GGUF"),
        (1, {"dtype": "bfloat16"}, "set one dtype"),
        (1, {"mode": "fast"}, "set one mode"),
        (1, {"quantize": "int8"}, "'int8', rank 2 'none': set one quantize"),
        (1, {"layers": (0, 3)}, "ends at layer 3 but rank 2 starts at 1"),
        (3, {"layers": (3, 4)}, "ends at layer 2 but rank 3 starts at 3"),
    ],
)
def test_a_refusal_says_what_to_change(rank: int, changes: dict[str, Any], sentence: str) -> None:
    reply = answer(ME, replace(hello(rank, 3), **changes))
    assert isinstance(reply, Fault)
    assert reply.code == "handshake"
    assert sentence in reply.text
