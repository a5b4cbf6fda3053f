"""Whatever a peer says ends its link at worst: no device job that comes of it fails."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.core.kv_slots import BLOCK
from asyncspec.core.machine import LinkDown, LinkUp
from asyncspec.core.tensors import WireTensor
from asyncspec.plugins.toy.model import ToyModel, ToyStage
from asyncspec_protocol.ids import (
    DRAFT,
    NodeId,
    SessionId,
    Version,
    draft_rank,
    first_session,
)
from asyncspec_protocol.messages import Close, Message, PruneIndices, Segment
from asyncspec_protocol.sampling import Constraint
from effort import examples
from languages import GRAMMARS
from nodes.byzantine_peer import Node, connected_stage, send_arbitrary_messages
from nodes.machine_driver import opening, prune, segment

VOCAB = 16


def toy(rank: int, stages: int) -> Node:
    """A stage of one toy layer."""
    device = ToyStage(ToyModel(layers=stages, vocab=VOCAB), rank - 1, rank)
    return connected_stage(rank, stages, VOCAB, device)


def rows(draw: Any, message: Segment) -> WireTensor:
    """Hidden states for a segment, most often of the right shape."""
    count, outer = len(message.ids), (1 + message.aux_states,) if 0 < message.aux_states < 9 else ()
    odd = [(count, 2), (count, 1, 1), (count, 3, 1), (count, 1, 1, 1), (count + 1, 1)]
    shape = draw(st.sampled_from([(count, *outer, 1)] * 7 + odd))
    return WireTensor("uint64", shape, memoryview(bytes(8 * math.prod(shape))))


@settings(max_examples=examples(300, quick=120))
@given(st.data())
def test_no_job_of_a_toy_stage_fails(data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, 3))
    rank = data.draw(st.integers(1, stages))
    first = rank == 1
    send_arbitrary_messages(
        toy(rank, stages), data, VOCAB, lambda d, m: None if first else rows(d, m)
    )


@pytest.mark.parametrize("rank", [1, 2])
def test_a_session_that_penalises_tokens_shares_no_prompt(rank: int) -> None:
    """It must read them all; the device would fail."""
    node = toy(rank, 2)
    node.receive(rank - 1, opening(3))
    penalised = replace(opening(4, session=1), presence_penalty=1.0)
    node.feed_rows(rank - 1, segment(0, {0: -1, 1: 0, 2: 1}, tokens=rank == 1))
    node.work()
    node.receive(rank - 1, replace(penalised, parent_session=0, common_prefix=2))
    assert [error.peer for error in node.refused] == [rank - 1]
    assert "its draws need" in str(node.refused[0])
    assert 1 not in node.driven.state.sessions


def test_a_stage_with_recurrent_states_shares_no_prompt() -> None:
    """The device has the states of one tip, and would fail."""
    device = ToyStage(ToyModel(layers=1, vocab=VOCAB), 0, 1)
    node = connected_stage(1, 1, VOCAB, device, shares_prefixes=False)
    node.receive(0, opening(3))
    node.feed_rows(0, segment(0, {0: -1, 1: 0, 2: 1}, tokens=True))
    node.work()
    node.receive(0, replace(opening(4, session=1), parent_session=0, common_prefix=2))
    assert [error.peer for error in node.refused] == [0]
    assert "which this target's layers cannot" in str(node.refused[0])
    assert 1 not in node.driven.state.sessions


def test_a_grammar_that_is_none_ends_no_stage() -> None:
    """A draft node refuses such requests; what one sends all the same draws ends."""
    device = ToyStage(ToyModel(layers=1, vocab=VOCAB), 0, 1)
    device.constrain(GRAMMARS)
    node = connected_stage(1, 1, VOCAB, device)
    node.receive(0, replace(opening(1), constraint=Constraint("[")))
    node.receive(0, segment(0, {0: -1}))
    node.work()
    assert not node.refused


@pytest.mark.parametrize("rank", [1, 2])
def test_a_bias_of_no_token_opens_no_session(rank: int) -> None:
    """Drawing would fail."""
    node = toy(rank, 2)
    for token in (VOCAB, VOCAB - 1):
        biased = Constraint(logit_bias=((1, -1.0), (token, 1.0)))
        node.receive(rank - 1, replace(opening(1, session=token), constraint=biased))
    assert [error.peer for error in node.refused] == [rank - 1]
    assert "token 16 is biased" in str(node.refused[0])
    assert set(node.driven.state.sessions) == {VOCAB - 1}


def test_stop_tokens_that_are_none_end_no_stage() -> None:
    """They are never drawn."""
    node = toy(1, 1)
    ending = Constraint(min_tokens=3, stop_tokens=(1, 2**31 - 1))
    node.receive(0, replace(opening(1), constraint=ending))
    node.receive(0, segment(0, {0: -1}))
    node.work()
    assert not node.refused


def test_rows_of_a_pass_that_was_given_up_go_nowhere() -> None:
    """A prune that names dead nodes again makes no rows of what was never computed."""
    node = toy(1, 2)
    node.receive(0, opening(1))
    node.receive(0, segment(0, {0: -1}))
    node.rest()
    node.receive(0, segment(1, {1: 0}))
    for version, keep in ((1, ()), (2, (1,))):
        node.receive(0, PruneIndices(SessionId(0), Version(version), NodeId(2), (), keep))
    assert node.abandoned
    node.rest()
    assert not node.driven.state.outbox


def test_nodes_beside_the_committed_path_are_refused() -> None:
    """The tip would move past its parent while it waits."""
    node = toy(1, 1)
    node.receive(0, opening(3))
    node.receive(0, segment(0, {0: -1, 1: 0}))
    node.receive(0, segment(1, {2: 0}))
    assert len(node.refused) == 1
    node.receive(0, segment(2, {2: 1}))
    node.receive(0, segment(3, {3: 2, 4: 2}))
    node.receive(0, PruneIndices(SessionId(0), Version(1), NodeId(5), (NodeId(3),), (NodeId(4),)))
    assert len(node.refused) == 2
    node.rest()


def pruned(version: int, horizon: int, accepted: Sequence[int], keep: Sequence[int]) -> Message:
    """A prune of session 0."""
    return prune(version, horizon, tuple(accepted), tuple(keep)).message


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize(
    "message",
    [
        pruned(1, 4, (), (3,)),
        pruned(1, 3, (), ()),
        pruned(1, 4, (1,), (1, 3)),
        pruned(1, 4, (), (2, 3)),
    ],
    ids=["kept", "younger", "accepted", "branch"],
)
def test_a_prune_that_leaves_a_node_without_its_parent_is_refused(
    rank: int, message: Message
) -> None:
    """Of the chain 0-1-2-3. Rows below such a node would see other tokens than its ancestors."""
    node = toy(rank, 2)
    node.receive(rank - 1, opening(1))
    for number, some in enumerate(({0: -1}, {1: 0, 2: 1, 3: 2})):
        node.feed_rows(rank - 1, segment(number, some, tokens=rank == 1))
        node.work()
    node.receive(0, message)
    (error,) = node.refused
    assert error.peer == 0
    assert "without its parent" in str(error)
    assert len(node.driven.state.sessions[0].slots.speculative) == 3


def test_sessions_for_which_there_is_no_memory_are_refused() -> None:
    """A draft node admits none; what one takes all the same ends no stage. A tree of no stated size
    is as large as any."""
    for rank in (1, 2):
        node = toy(rank, 2)
        restrict(node, slots=8320)
        for session, capacity, tree in ((0, 129, -1), (1, 60, -1), (2, 65, 0), (3, 40, 0)):
            opened = replace(opening(1, session=session), capacity=capacity, max_tree_nodes=tree)
            node.receive(rank - 1, opened)
        assert list(node.driven.state.sessions) == [1, 3]
        assert len(node.refused) == (2 if rank == 1 else 0)
        assert len(node.faults) == (0 if rank == 1 else 2)


def restrict(node: Node, **limits: int) -> None:
    """Give a stage, and the draft node that is linked, other limits."""
    config = replace(node.driven.state.config, **limits)
    node.driven.state = replace(node.driven.state, config=config)
    node.feed(LinkDown(DRAFT))
    node.feed(LinkUp(DRAFT))


@pytest.mark.parametrize("rank", [1, 2])
def test_the_shortest_session_takes_a_block(rank: int) -> None:
    """As it does in the device's cache."""
    node = toy(rank, 2)
    restrict(node, slots=3 * BLOCK - 1)
    for session in range(3):
        opened = replace(opening(1, session=session), capacity=1, max_tree_nodes=0)
        node.receive(rank - 1, opened)
    assert list(node.driven.state.sessions) == [0, 1]
    assert len([*node.refused, *node.faults]) == 1


@pytest.mark.parametrize("rank", [1, 2])
def test_a_draft_node_has_so_many_sessions_and_kept_prompts(rank: int) -> None:
    """However small they are; each costs the stage time. Another one's do not count."""
    node, other = toy(rank, 2), draft_rank(1)
    restrict(node, sessions=3)
    node.feed(LinkUp(other))
    theirs = first_session(other)
    for session in (0, theirs, 1, theirs + 1, 2):
        node.receive(other if rank == 1 and session >= theirs else rank - 1, opening(1, session))
    node.feed_rows(rank - 1, segment(0, {0: -1}, tokens=rank == 1))
    node.rest()
    node.receive(0, Close(SessionId(0), keep=True))
    assert node.driven.state.cached_prompts == {0: 1}
    node.receive(rank - 1, opening(1, session=3))
    errors = [str(error) for error in node.refused] + [fault.text for _, fault in node.faults]
    assert len(errors) == 1
    assert "more than 3 sessions" in errors[0]
    assert set(node.driven.state.sessions) == {1, 2, theirs, theirs + 1}
