"""Rules of several draft nodes on one pipeline are load-bearing: break one, and the laws notice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

import asyncspec_nodes.roles.verify.batching as batching
import asyncspec_nodes.roles.verify.lifecycle as lifecycle
from asyncspec.core.machine import Request
from asyncspec_nodes.roles.verify import segments
from asyncspec_protocol.errors import ProtocolError
from asyncspec_protocol.ids import DRAFT, Rank, SessionId, draft_rank, first_session
from byzantine_draft import LinkClosingWorld, inert, opening
from cluster import Cluster, ask
from laws import SMALL, Shaken, check_after, watch_invariants
from nodes.machine_driver import segment

DELAYS = ([1], [3, 1, 0, 2], [0, 5, 1, 1, 7, 2], [2, 9, 0, 0, 1, 4, 3])
DRAFTS = 3
GONE = draft_rank(DRAFTS - 1)
SLOW = draft_rank(DRAFTS)
LATE = 2000.0


def laws_hold() -> bool:
    """Run a fixed sample of what ``test_multiple_drafts.py`` draws; False where a law is broken."""
    try:
        for seed, delays in enumerate(DELAYS * 2):
            run(Shaken(list(delays)), seed)
    except (AssertionError, ProtocolError, ValueError, KeyError, IndexError):
        return False
    return True


def run(costs: Shaken, seed: int) -> None:
    """Of three draft nodes one ends in the middle; a fourth announces what never comes."""
    cluster = Cluster(
        costs, stages=1 + seed % 3, drafts=DRAFTS, policies=SMALL, top=0.7, world=LinkClosingWorld
    )
    watch_invariants(cluster)
    world = cluster.world
    world.actors[SLOW] = inert()
    cluster.drafts.add(SLOW)
    cluster.connect_all()
    slow: SessionId = first_session(SLOW)
    for message in (opening(slow), replace(segment(0, {0: -1}, session=slow), batch_remaining=1)):
        world.at(3, world.inject, SLOW, Rank(1), message)  # type: ignore[attr-defined]
    served: list[Request] = []
    for number in range(2 * DRAFTS):
        rank = draft_rank(number % DRAFTS)
        request = ask(number, prompt=(seed % 8, number), max_new_tokens=20)
        cluster.submit(request, rank)
        if rank != GONE:
            served.append(request)
    world.at(9 + seed, cluster.leave, GONE)
    world.at(LATE, check_served, cluster, served)
    world.at(LATE, cluster.leave, SLOW)
    world.run(until=50_000.0, most_steps=20_000)
    check_after(cluster, served)


def check_served(cluster: Cluster, requests: Sequence[Request]) -> None:
    """All have been, in a session each, while the slow one was still there."""
    for request in requests:
        finish = cluster.world.finished.get(request.request)
        assert finish is not None
        assert finish.stats["sessions"] == 1


def test_the_laws_hold_without_a_mutant() -> None:
    assert laws_hold()


def all_wait_for_one(state: Any) -> Any:
    """What one has announced holds everybody up."""
    if any(credit.expected for credit in state.inbound.values()):
        return {waiting.session for waiting in state.queue}
    return ()


def counted_together(verdicts: Any) -> Any:
    """Verdicts of one pass are counted whoever gets them."""
    last = len(verdicts) - 1
    return [
        replace(send, message=replace(send.message, batch_remaining=last - i))
        for i, send in enumerate(verdicts)
    ]


def all_to_the_first(session: Any) -> Rank:
    """There is but one draft node."""
    return DRAFT


def all_sessions_dropped(state: Any, over: Any) -> Any:
    """The loss of one draft node ends everybody's sessions."""
    return DROP(state, frozenset(state.sessions) | frozenset(state.closing))


DROP = lifecycle._drop

MUTANTS: list[tuple[str, Any, str, Callable[..., Any]]] = [
    ("all wait for what one has announced", batching, "_held", all_wait_for_one),
    ("verdicts are counted over all links", segments, "_with_batch_remaining", counted_together),
    ("verdicts go to draft node 0", segments, "owner", all_to_the_first),
    ("a lost draft node takes all with it", lifecycle, "_drop", all_sessions_dropped),
]


@pytest.mark.parametrize(
    ("target", "name", "broken"), [m[1:] for m in MUTANTS], ids=[m[0] for m in MUTANTS]
)
def test_the_laws_notice(
    monkeypatch: pytest.MonkeyPatch, target: Any, name: str, broken: Callable[..., Any]
) -> None:
    monkeypatch.setattr(target, name, broken)
    assert not laws_hold()
