"""The draft node as a machine: requests in, segments and prunes out, certain tokens to the user.

Law of this package: nothing is waited for. Verdicts, drafts, credit, requests and losses come in
any order; after each of them every session goes as far as it can. A lost peer ends sessions, never
requests: the committed path is here, and a new session goes on from it. Pure.
"""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from asyncspec.actor.machine import (
    Cancelled,
    Computed,
    Fired,
    Input,
    Joined,
    Lost,
    Planned,
    Received,
    Stopped,
    Submitted,
)
from asyncspec.jobs import Drafting
from asyncspec.source.batch import Answers, answers
from asyncspec_nodes.machines.draft import drafting, measuring, verdicts
from asyncspec_nodes.machines.draft.ends import account
from asyncspec_nodes.machines.draft.going_on import go_on
from asyncspec_nodes.machines.draft.lines import pass_seconds
from asyncspec_nodes.machines.draft.peers import broken, complete, heard, joined, lost
from asyncspec_nodes.machines.draft.requests import cancelled, fired, stopped, submitted
from asyncspec_nodes.machines.draft.state import FIRST, DraftConfig, DraftState, Effects, put
from asyncspec_protocol.errors import LocalProtocolError, RemoteProtocolError
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import (
    Closed,
    Credit,
    Expand,
    Expanded,
    PassTimes,
    Ready,
    Schedule,
    Verdict,
)


class DraftMachine:
    """The role ``draft``."""

    def __init__(self, config: DraftConfig) -> None:
        self.config = config

    def initial(self) -> DraftState:
        """A draft node that has met nobody yet."""
        return DraftState(config=self.config, next_session=self.config.first_session)

    def step(self, state: DraftState, event: Input, now: float) -> tuple[DraftState, Effects]:
        """React to one input. Raises ``RemoteProtocolError`` for what a peer must not say."""
        match event:
            case Received():
                state, effects = _received(state, event, now)
            case Computed(Expand() | Drafting() as job, result, seconds):
                state, effects = _drafted(state, answers(job, result), seconds)
            case Computed(job):
                raise LocalProtocolError(f"{type(job).__name__} has no result here")
            case Submitted(request):
                state, effects = submitted(state, request, now)
            case Cancelled(request_id):
                state, effects = cancelled(state, request_id, now)
            case Stopped(request_id, kept):
                state, effects = stopped(state, request_id, kept, now)
            case Fired(timer):
                state, effects = fired(state, timer, now)
            case Joined(peer):
                state, effects = joined(state, peer)
            case Lost(peer):
                state, effects = lost(state, peer, now)
            case Planned():
                raise LocalProtocolError("a draft node plans nothing")
            case _:
                assert_never(event)
        state, more = go_on(state, now)
        return state, (*effects, *more)


def _received(state: DraftState, event: Received, now: float) -> tuple[DraftState, Effects]:
    peer, message = event.peer, event.message
    match message:
        case Verdict() if peer == state.config.stages:
            state = replace(state, expected=message.more)
            state = measuring.on_the_way(state, message, event.seconds, now)
            return _verdict(measuring.judged(state, message, now), message, event.tensor), ()
        case Credit(limit, room) if peer == FIRST:
            if limit < state.allowed:
                raise RemoteProtocolError("credit was taken back", peer=peer)
            window = room or state.window or limit
            return replace(state, allowed=limit, window=window), ()
        case Ready(rank, up) if peer == rank:
            echo, state = rank in state.echoes, heard(state, message)
            if up == (peer in state.ready):
                return state, ()  # only its slots have changed: another draft node came or went
            if up:
                return complete(replace(state, ready=state.ready | {peer}))
            down = replace(state, ready=state.ready - {peer})
            return broken(down, now, stood=state.up, echo=echo)
        case PassTimes(rank) if peer == rank:
            times = {**state.times, peer: message}
            state = replace(state, times=times, lines=state.lines.told(times))
            return state, measuring.pass_on(state, message)
        case Schedule() if peer == FIRST:
            return measuring.scheduled(state, message), ()
        case Closed() if peer == message.rank:
            return account(state, message)
        case Expanded() if peer == state.config.source:
            return _answered(state, message, peer)
        case _:
            raise RemoteProtocolError(f"unexpected {type(message).__name__}", peer=peer)


def _verdict(state: DraftState, message: Verdict, tensor: object | None) -> DraftState:
    session = state.sessions.get(message.session)
    if session is None:
        if message.session >= state.next_session:
            raise RemoteProtocolError(
                f"session {message.session} was never opened", peer=Rank(state.config.stages)
            )
        return state  # the session is over
    if max((*message.tokens, *message.likely), default=0) >= state.config.vocab:
        raise RemoteProtocolError("a token that is not in the vocabulary")
    return put(state, verdicts.judge(session, message, tensor))


def _drafted(state: DraftState, batch: Answers, seconds: float) -> tuple[DraftState, Effects]:
    """The source of this device is free again. Its time was spent for all alike."""
    state = measuring.drafted(replace(state, drafting=False), batch, seconds)
    for _, answer in batch:
        state = _expanded(state, answer, seconds / len(batch))
    return state, ()


def _expanded(state: DraftState, answer: Expanded, seconds: float) -> DraftState:
    session = state.sessions.get(answer.session)
    if session is None:
        return state  # the session is over
    return put(state, drafting.expanded(session, answer, seconds, pass_seconds(state.times)))


def _answered(state: DraftState, answer: Expanded, peer: Rank) -> tuple[DraftState, Effects]:
    """The same from another node, which may say anything."""
    if (session := state.sessions.get(answer.session)) is not None:
        asked = session.asked
        if asked is None or answer.base != asked.length:
            raise RemoteProtocolError(f"nothing was asked for session {answer.session}", peer=peer)
        if max(answer.tokens, default=0) >= state.config.vocab:
            raise RemoteProtocolError("a token that is not in the vocabulary", peer=peer)
        state = measuring.drafted(state, ((asked.job, answer),), answer.seconds)
    return _expanded(state, answer, answer.seconds), ()
