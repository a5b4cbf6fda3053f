"""The draft node as a machine: requests in, segments and prunes out, certain tokens to the user.

Law of this file: nothing is waited for. Verdicts, drafts, credit, requests and losses come in any
order; after each of them every session goes as far as it can. A lost peer ends sessions, never
requests: the committed path is here, and a new session goes on from it. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from asyncspec.actor.machine import (
    Abandon,
    Arm,
    Cancelled,
    Compute,
    Computed,
    Effect,
    Emit,
    Finish,
    Fired,
    Input,
    Joined,
    Lost,
    Received,
    Request,
    Send,
    Stopped,
    Submitted,
)
from asyncspec.jobs import Release
from asyncspec.policy import POLICIES, Policy
from asyncspec_nodes.machines.draft import session as sessions
from asyncspec_nodes.machines.draft.counters import Counters, summary
from asyncspec_nodes.machines.draft.session import DraftSession
from asyncspec_protocol.errors import LocalProtocolError, RemoteProtocolError
from asyncspec_protocol.ids import Rank, SessionId
from asyncspec_protocol.messages import (
    Close,
    Closed,
    Credit,
    Expand,
    Expanded,
    Floor,
    Message,
    Open,
    Ready,
    Verdict,
)

Effects = tuple[Effect, ...]

FIRST = Rank(1)
REJOIN = "rejoin"


class DraftConfig(Struct, frozen=True):
    """How the draft node works."""

    stages: int
    policies: Mapping[str, Policy] = field(default_factory=lambda: POLICIES)
    # Prompt nodes per segment.
    prefill_rows: int = 64
    # Requests that are processed at a time; the others wait their turn.
    max_sessions: int = 4
    # How long requests wait for a pipeline that is down before they fail.
    rejoin_seconds: float = 30.0
    # How long the end of a request waits for the stages' accounts.
    account_seconds: float = 2.0
    # What the token source reads of the target beside its tokens, as in ``Open.features``.
    features: tuple[int, ...] = ()
    # Session ids grow also over restarts of this node: the shell starts from the clock.
    first_session: SessionId = SessionId(0)


class Job(Struct, frozen=True):
    """A request that waits for a session, with what it has brought so far."""

    request: Request
    counters: Counters
    given: tuple[int, ...] = ()


class Ending(Struct, frozen=True):
    """A request whose last tokens are out; the stages' accounts are still to come."""

    session: DraftSession
    reason: str
    ended: float
    missing: frozenset[Rank]


class DraftState(Struct, frozen=True):
    """Everything the draft node knows. Mappings are never changed in place."""

    config: DraftConfig
    next_session: SessionId
    backlog: tuple[Job, ...] = ()
    # In order of service: the first to have credit is the one that has waited longest.
    sessions: Mapping[SessionId, DraftSession] = {}
    endings: Mapping[SessionId, Ending] = {}
    peers: frozenset[Rank] = frozenset()
    # Stages whose link to the next one is up.
    ready: frozenset[Rank] = frozenset()
    # Segments the first stage allows in all on this link, and those sent.
    allowed: int = 0
    sent: int = 0
    # What the first stage allows to wait: its first credit.
    window: int = 0

    @property
    def up(self) -> bool:
        """True while every stage is reachable and linked to the next."""
        everyone = frozenset(Rank(r) for r in range(1, self.config.stages + 1))
        return everyone <= self.peers and everyone <= self.ready


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
            case Received(peer, message, tensor):
                state, effects = _received(state, peer, message, tensor, now)
            case Computed(Expand(), Expanded() as answer, seconds):
                state, effects = _expanded(state, answer, seconds)
            case Computed(job):
                raise LocalProtocolError(f"{type(job).__name__} has no result here")
            case Submitted(request):
                state, effects = _submitted(state, request, now)
            case Cancelled(request_id):
                state, effects = _cancelled(state, request_id, now)
            case Stopped(request_id, kept):
                state, effects = _stopped(state, request_id, kept, now)
            case Fired(timer):
                state, effects = _fired(state, timer, now)
            case Joined(peer):
                state, effects = _joined(state, peer), ()
            case Lost(peer):
                state, effects = _lost(state, peer, now)
            case _:
                assert_never(event)
        state, more = _go_on(state, now)
        return state, (*effects, *more)


# --- going on -----------------------------------------------------------------------------------


def _go_on(state: DraftState, now: float) -> tuple[DraftState, Effects]:
    """Open what can be opened, accept what can be accepted, ask and send what can be."""
    effects: list[Effect] = []
    for session in state.sessions.values():
        state, accepted = _advance(state, session, now)
        effects.extend(accepted)
    while state.up and state.backlog and len(state.sessions) < state.config.max_sessions:
        state, opened = _open(state)
        effects.extend(opened)
    state, sent = _send(state)
    effects.extend(sent)
    for session in state.sessions.values():
        if fed := sessions.feed(session):
            session = fed[0]
            state = _put(state, session)
            effects.append(Compute(fed[1]))
        if stopped := sessions.stop_asking(session):
            state = _put(state, stopped[0])
            effects.append(Abandon(stopped[1]))
        elif asked := sessions.ask(session, starving=_starving(state)):
            state = _put(state, asked[0])
            effects.append(Compute(asked[1]))
    return state, tuple(effects)


def _put(state: DraftState, session: DraftSession) -> DraftState:
    return replace(state, sessions={**state.sessions, session.session: session})


def _without(state: DraftState, session: SessionId) -> DraftState:
    left = {k: v for k, v in state.sessions.items() if k != session}
    return replace(state, sessions=left)


def _starving(state: DraftState) -> bool:
    return state.allowed - state.sent >= state.window


def _open(state: DraftState) -> tuple[DraftState, Effects]:
    job, config = state.backlog[0], state.config
    request, sampling = job.request, job.request.sampling
    policy = config.policies[request.policy]
    features = config.features if policy.drafts else ()
    session = sessions.open_session(
        state.next_session,
        request,
        policy,
        config.stages,
        job.given,
        job.counters,
        featured=bool(features),
    )
    message = Open(
        session=session.session,
        prompt_length=len(session.prefix),
        capacity=len(request.prompt) + request.max_new_tokens,
        given=len(job.given),
        features=features,
        **asdict(sampling),
    )
    state = replace(
        state, backlog=state.backlog[1:], next_session=SessionId(state.next_session + 1)
    )
    return _put(state, session), (Send(FIRST, message),)


def _advance(state: DraftState, session: DraftSession, now: float) -> tuple[DraftState, Effects]:
    moved = sessions.advance(session, now)
    if moved is None:
        return state, ()
    request = session.request.request
    effects: Effects = (Emit(request, moved.tokens, moved.hits, session.session),)
    if moved.finish is not None:
        state, ended = _end(state, moved.session, moved.finish, now)
        return state, (*effects, *ended)
    assert moved.prune is not None
    prunes = tuple(Send(rank, moved.prune) for rank in _stages(state))
    return _put(state, moved.session), (*effects, *prunes)


def _send(state: DraftState) -> tuple[DraftState, Effects]:
    """Hand out credit, one segment a session in turn, the longest waiting first."""
    effects: list[Effect] = []
    idle = 0
    while state.sent < state.allowed and idle < len(state.sessions):
        session = next(iter(state.sessions.values()))
        cut = sessions.next_segment(
            session, prefill_rows=state.config.prefill_rows, starving=_starving(state)
        )
        if cut is None:
            idle += 1
        else:
            idle = 0
            session, message = cut
            state = replace(state, sent=state.sent + 1)
            effects.append(Send(FIRST, message))
        state = _put(_without(state, session.session), session)
    return state, tuple(effects)


def _stages(state: DraftState) -> tuple[Rank, ...]:
    return tuple(sorted(state.peers))


# --- messages and results -----------------------------------------------------------------------


def _received(
    state: DraftState, peer: Rank, message: Message, tensor: object | None, now: float
) -> tuple[DraftState, Effects]:
    match message:
        case Verdict() if peer == state.config.stages:
            return _verdict(state, message, tensor), ()
        case Credit(limit) if peer == FIRST:
            if limit < state.allowed:
                raise RemoteProtocolError("credit was taken back", peer=peer)
            window = state.window or limit
            return replace(state, allowed=limit, window=window), ()
        case Ready(rank, up) if peer == rank:
            if up:
                return _complete(replace(state, ready=state.ready | {peer}))
            return _down(replace(state, ready=state.ready - {peer}), now)
        case Closed() if peer == message.rank:
            return _account(state, message)
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
    return _put(state, sessions.judge(session, message, tensor))


def _expanded(state: DraftState, answer: Expanded, seconds: float) -> tuple[DraftState, Effects]:
    session = state.sessions.get(answer.session)
    if session is None:
        return state, ()
    return _put(state, sessions.expanded(session, answer, seconds)), ()


# --- requests -----------------------------------------------------------------------------------


def _submitted(state: DraftState, request: Request, now: float) -> tuple[DraftState, Effects]:
    fine = request.prompt and request.max_new_tokens > 0
    if not fine or request.policy not in state.config.policies:
        raise LocalProtocolError(f"request {request.request} is not one a user may make")
    job = Job(request=request, counters=Counters(started=now))
    state = replace(state, backlog=(*state.backlog, job))
    if state.up or len(state.backlog) > 1:
        return state, ()
    return state, (Arm(REJOIN, now + state.config.rejoin_seconds),)


def _cancelled(state: DraftState, request_id: int, now: float) -> tuple[DraftState, Effects]:
    for job in state.backlog:
        if job.request.request == request_id:
            left = tuple(j for j in state.backlog if j is not job)
            finish = _unserved(job, "cancelled", "", now)
            return replace(state, backlog=left), (finish,)
    for session in state.sessions.values():
        if session.request.request == request_id:
            return _end(state, session, "cancelled", now)
    return state, ()


def _stopped(
    state: DraftState, request_id: int, kept: int, now: float
) -> tuple[DraftState, Effects]:
    """An answer ends with its ``kept``-th token. Meanwhile it may have got more of them, may have
    reached another end, or may wait for the pipeline to come back."""
    for job in state.backlog:
        if job.request.request == request_id:
            _check_kept(kept, job.given)
            left = tuple(j for j in state.backlog if j is not job)
            finish = _unserved(replace(job, given=job.given[:kept]), "stop", "", now)
            return replace(state, backlog=left), (finish,)
    for session in state.sessions.values():
        if session.request.request == request_id:
            _check_kept(kept, session.given)
            return _end(state, sessions.keep(session, kept), "stop", now)
    for key, ending in state.endings.items():
        if ending.session.request.request == request_id:
            _check_kept(kept, ending.session.given)
            session = sessions.keep(ending.session, kept)
            ended = replace(ending, session=session, reason="stop")
            return replace(state, endings={**state.endings, key: ended}), ()
    return state, ()


def _check_kept(kept: int, given: tuple[int, ...]) -> None:
    if not 0 < kept <= len(given):
        raise LocalProtocolError(f"an answer of {len(given)} tokens cannot end with token {kept}")


def _unserved(job: Job, reason: str, detail: str, now: float) -> Finish:
    """The end of a request that is in no session."""
    stats = _stats(job.request, job.counters, job.given, now, stages=0)
    return Finish(request=job.request.request, reason=reason, stats=stats, detail=detail)


def _stats(
    request: Request, counters: Counters, given: tuple[int, ...], ended: float, *, stages: int
) -> dict[str, float]:
    length = len(request.prompt) + len(given)
    return summary(
        counters,
        prompt_tokens=len(request.prompt),
        new_tokens=len(given),
        ended=ended,
        useful_rows=stages * (length - 1),
    )


def _end(
    state: DraftState, session: DraftSession, reason: str, now: float
) -> tuple[DraftState, Effects]:
    """Close a session everywhere. Its request ends when the stages have given account."""
    state, effects = _close(state, session)
    key = session.session
    ending = Ending(session=session, reason=reason, ended=now, missing=state.peers)
    state = replace(state, endings={**state.endings, key: ending})
    return state, (*effects, Arm(_timer(key), now + state.config.account_seconds))


def _close(state: DraftState, session: DraftSession) -> tuple[DraftState, Effects]:
    closes = tuple(Send(rank, Close(session.session)) for rank in _stages(state))
    release: Effects = (Compute(Release(session.session)),) if session.policy.drafts else ()
    if session.asked is not None and not session.asked.abandoned:
        release = (Abandon(session.asked.job), *release)
    return _without(state, session.session), (*closes, *release)


def _timer(session: SessionId) -> str:
    return f"account:{session}"


def _account(state: DraftState, message: Closed) -> tuple[DraftState, Effects]:
    ending = state.endings.get(message.session)
    if ending is None or message.rank not in ending.missing:
        return state, ()  # too late: the request has ended without it
    counters = ending.session.counters.closed(message)
    ending = replace(
        ending,
        session=replace(ending.session, counters=counters),
        missing=ending.missing - {message.rank},
    )
    state = replace(state, endings={**state.endings, message.session: ending})
    return _finish_if_complete(state, message.session)


def _finish_if_complete(
    state: DraftState, key: SessionId, *, force: bool = False
) -> tuple[DraftState, Effects]:
    ending = state.endings[key]
    if ending.missing and not force:
        return state, ()
    session = ending.session
    stats = _stats(
        session.request,
        _with_turns(session),
        session.given,
        ending.ended,
        stages=session.stages,
    )
    state = replace(state, endings={k: v for k, v in state.endings.items() if k != key})
    finish = Finish(request=session.request.request, reason=ending.reason, stats=stats, session=key)
    return state, (Arm(_timer(key), None), finish)


def _with_turns(session: DraftSession) -> Counters:
    counters = session.counters
    return replace(counters, turns=counters.turns + session.clock.now)


def _fired(state: DraftState, timer: str, now: float) -> tuple[DraftState, Effects]:
    if timer == REJOIN:
        if state.up:
            return state, ()
        detail = "the pipeline is not complete: " + _who_is_missing(state)
        failed = tuple(_unserved(job, "error", detail, now) for job in state.backlog)
        return replace(state, backlog=()), failed
    for key in state.endings:
        if timer == _timer(key):
            return _finish_if_complete(state, key, force=True)
    return state, ()


def _who_is_missing(state: DraftState) -> str:
    ranks = range(1, state.config.stages + 1)
    gone = [f"stage {r} is not connected" for r in ranks if r not in state.peers]
    cut = [
        f"stage {r} has no link to stage {r + 1}"
        for r in ranks
        if r in state.peers and r not in state.ready
    ]
    return ", ".join(gone or cut) or "a stage came back too late"


# --- peers --------------------------------------------------------------------------------------


def _complete(state: DraftState) -> tuple[DraftState, Effects]:
    """If the pipeline stands now: what earlier sessions left behind somewhere is void."""
    if not state.up or state.sessions:
        return state, ()
    floor = Floor(first=state.next_session)
    floors = tuple(Send(rank, floor) for rank in _stages(state))
    return state, (*floors, Arm(REJOIN, None))


def _joined(state: DraftState, peer: Rank) -> DraftState:
    state = replace(state, peers=state.peers | {peer})
    return replace(state, allowed=0, sent=0, window=0) if peer == FIRST else state


def _lost(state: DraftState, peer: Rank, now: float) -> tuple[DraftState, Effects]:
    if peer not in state.peers:
        return state, ()
    state = replace(state, peers=state.peers - {peer}, ready=state.ready - {peer})
    state, down = _down(state, now)
    effects = list(down)
    for key, ending in state.endings.items():
        left = replace(ending, missing=ending.missing - {peer})
        state = replace(state, endings={**state.endings, key: left})
        state, finished = _finish_if_complete(state, key)
        effects.extend(finished)
    return state, tuple(effects)


def _down(state: DraftState, now: float) -> tuple[DraftState, Effects]:
    """The pipeline is broken: sessions end, their requests go back to the head of the backlog."""
    effects: list[Effect] = []
    back: list[Job] = []
    for session in state.sessions.values():
        state, closed = _close(state, session)
        effects.extend(closed)
        back.append(Job(session.request, _with_turns(session), session.given))
    back.sort(key=lambda job: job.request.request)
    state = replace(state, backlog=(*back, *state.backlog))
    if state.backlog:
        effects.append(Arm(REJOIN, now + state.config.rejoin_seconds))
    return state, tuple(effects)
