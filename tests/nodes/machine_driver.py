"""Driving one machine by hand: inputs in, effects out."""

from __future__ import annotations

from typing import Any, TypeVar

from msgspec.structs import replace

from asyncspec.core.jobs import Batch, Forward, Job, Release
from asyncspec.core.machine import (
    Abandon,
    Compute,
    Computed,
    Effect,
    Input,
    LinkUp,
    Received,
    RunNext,
    Send,
    SendClosed,
)
from asyncspec_nodes.roles.draft.config import DraftConfig
from asyncspec_nodes.roles.draft.machine import DraftMachine
from asyncspec_nodes.roles.verify.config import VerifyConfig
from asyncspec_nodes.roles.verify.machine import VerifyMachine
from asyncspec_protocol.ids import DRAFT, NodeId, Rank, SegmentId, SessionId, Version, owner
from asyncspec_protocol.messages import Credit, Open, PruneIndices, Ready, Segment
from laws import SMALL

T = TypeVar("T")


class Driven:
    """A machine, its state, and every effect so far."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.state = machine.initial()
        self.now = 0.0

    def at(self, now: float, event: Input) -> list[Effect]:
        """The effects of an input at a time of its own."""
        self.now = now
        self.state, effects = self.machine.step(self.state, event, now)
        return list(effects)

    def feed(self, *events: Input) -> list[Effect]:
        """The effects of these inputs, each a second after the one before."""
        effects: list[Effect] = []
        for event in events:
            effects += self.at(self.now + 1.0, event)
        return effects


def sent(effects: list[Effect], kind: type[T], to: int | None = None) -> list[T]:
    """Messages of one type, in order."""
    return [
        e.message
        for e in effects
        if isinstance(e, Send) and isinstance(e.message, kind) and to in (None, e.to)
    ]


def passes(effects: list[Effect]) -> list[Forward]:
    """Forward passes that were asked for."""
    return [e.job for e in effects if isinstance(e, Compute) and isinstance(e.job, Forward)]


def announced(effects: list[Effect]) -> list[Job | None]:
    """What the device was told to go on with by itself."""
    return [e.job for e in effects if isinstance(e, RunNext)]


def abandoned(effects: list[Effect]) -> list[Job]:
    """Jobs that nobody waits for any more."""
    return [e.job for e in effects if isinstance(e, Abandon)]


def forgotten(session: int) -> list[Effect]:
    """What a token source does with a session that is over: its books close too."""
    name = SessionId(session)
    return [Compute(Release(name)), SendClosed(owner(name), name, 0, 0, 0, 0.0)]


def stage(
    rank: int = 1,
    stages: int = 1,
    prompt_length: int = 1,
    window: int = 8,
    features: tuple[int, ...] = (),
    *,
    coalesce: bool = False,
) -> Driven:
    """A stage of one layer whose peers are there, with session 0 open."""
    config = VerifyConfig(
        Rank(rank), stages, window, first_layer=rank - 1, end_layer=rank, layers=stages
    )
    driven = Driven(VerifyMachine(config))
    peers = {DRAFT, Rank(rank - 1)} | ({Rank(rank + 1)} if rank < stages else set())
    driven.feed(*(LinkUp(peer) for peer in sorted(peers)))
    if rank < stages:
        driven.feed(Received(Rank(rank + 1), Credit(1000)))
    message = replace(opening(prompt_length, features=features), coalesce=coalesce)
    driven.feed(Received(Rank(rank - 1), message))
    return driven


def draft(
    stages: int = 1, credit: int = 100, features: tuple[int, ...] = (), **more: Any
) -> Driven:
    """A draft node whose stages stand."""
    config = DraftConfig(stages=stages, policies=SMALL, features=features, max_sessions=4, **more)
    driven = Driven(DraftMachine(config))
    for rank in range(1, stages + 1):
        driven.feed(LinkUp(Rank(rank)), Received(Rank(rank), Ready(Rank(rank), True)))
    driven.feed(Received(Rank(1), Credit(credit)))
    return driven


def opening(prompt_length: int, session: int = 0, features: tuple[int, ...] = ()) -> Open:
    """A greedy session."""
    return Open(SessionId(session), prompt_length, 64, 0, 0.0, 0, 1.0, features=features)


def segment(
    number: int,
    nodes: dict[int, int],
    *,
    tokens: bool = True,
    session: int = 0,
    aux_states: int = 0,
) -> Segment:
    """A segment of ``nodes``: id -> parent. Every node's token is its id."""
    return Segment(
        session=SessionId(session),
        segment=SegmentId(number),
        applied=Version(0),
        ids=tuple(map(NodeId, nodes)),
        parents=tuple(map(NodeId, nodes.values())),
        tokens=tuple(nodes) if tokens else (),
        aux_states=aux_states,
    )


def prune(version: int, horizon: int, accepted: tuple[int, ...], keep: tuple[int, ...]) -> Received:
    """A prune of session 0, from the draft node."""
    return Received(
        DRAFT,
        PruneIndices(
            SessionId(0),
            Version(version),
            NodeId(horizon),
            tuple(map(NodeId, accepted)),
            tuple(map(NodeId, keep)),
        ),
    )


def received(driven: Driven, number: int, nodes: dict[int, int], **more: Any) -> Received:
    """A segment from whom they come."""
    rank = driven.machine.config.rank
    message = segment(number, nodes, tokens=rank == 1, **more)
    return Received(Rank(rank - 1), message, None if rank == 1 else "rows")


def outcome(driven: Driven, job: Forward) -> object:
    """Of a pass: tokens that no node has, or rows."""
    last = driven.machine.config.last
    return tuple(99 for _ in job.sampled_rows) if last else tuple(range(len(job.rows)))


def done(job: Forward | Batch, result: object, seconds: float = 0.5) -> Computed:
    """The device has finished a pass."""
    return Computed(job, result, seconds)
