"""Segments that come from draft nodes or the stage before: checked, thinned and queued."""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from msgspec.structs import replace

from asyncspec.core.cost_model.passes import PassCost
from asyncspec.core.jobs import Batch, Forward, TensorRows
from asyncspec.core.machine import (
    Cancelled,
    Computed,
    Input,
    LinkDown,
    LinkUp,
    Received,
    Send,
    Stopped,
    Submitted,
    TaskDone,
    TimerFired,
)
from asyncspec_nodes.roles.ownership import check_owner
from asyncspec_nodes.roles.verify import planning
from asyncspec_nodes.roles.verify.batch_schedule import BATCH_DEADLINE
from asyncspec_nodes.roles.verify.flow_control import grant, lengthen, pruned, put
from asyncspec_nodes.roles.verify.lifecycle import closed, joined, lost, opened, raise_floor, ready
from asyncspec_nodes.roles.verify.lookahead import send_parked, serve
from asyncspec_nodes.roles.verify.results import computed
from asyncspec_nodes.roles.verify.session import StageSession, Waiting, orphan_error, taps, thin
from asyncspec_nodes.roles.verify.state import Effects, VerifyConfig, VerifyState, check_was_opened
from asyncspec_protocol.errors import LocalProtocolError, RemoteProtocolError
from asyncspec_protocol.ids import Rank, is_draft, owner
from asyncspec_protocol.messages import (
    Close,
    Credit,
    Fault,
    Floor,
    Open,
    PassTimes,
    PruneIndices,
    Rates,
    Segment,
)


def arrived(
    state: VerifyState, peer: Rank, message: Segment, tensor: object | None, now: float
) -> tuple[VerifyState, Effects]:
    """A segment has come. Raises ``RemoteProtocolError`` for one that must not come."""
    state = _segment_received(state, peer, message)
    session, first = state.sessions.get(message.session), is_draft(peer)
    ids = message.ids
    if (tensor is None) != first or not _has_tokens(session, message, first) or not ids:
        raise RemoteProtocolError("segment without its rows' input", peer=peer)
    if message.tokens and max(message.tokens) >= state.config.vocab:
        raise RemoteProtocolError("segment with a token that is not in the vocabulary", peer=peer)
    if session is None:
        check_was_opened(state, message.session, peer)
        return grant(state, (peer,))
    if message.taps != taps(session, state.config.first_layer):
        raise RemoteProtocolError(f"segment with {message.taps} taps a row", peer=peer)
    waiting = thin(
        session,
        Waiting(
            session=message.session,
            segment=message.segment,
            applied=message.applied,
            ids=ids,
            parents=message.parents,
            tokens=message.tokens,
            hidden=None if first else TensorRows(tensor, tuple(range(len(ids)))),
            since=now,
            spent=message.stage_seconds,
            timed=message.stage_seconds > 0 or message.session in state.schedule.members,
            turn=message.pass_number,
        ),
    )
    if waiting is None:
        return grant(state, (peer,))
    before = [w for w in state.queue if w.session == message.session]
    if wrong := orphan_error(session, before, (waiting,)):
        return _refuse_orphan(state, peer, message, wrong)
    if first and (wrong := _too_large(session, before, waiting)):
        raise RemoteProtocolError(wrong, peer=peer)
    state = lengthen(planning.segment_arrived(state, message.session, now), peer, message)
    return grant(replace(state, queue=(*state.queue, waiting)), (peer,))


def by_line(state: VerifyState, message: Segment, seconds: float) -> VerifyState:
    """The line takes ``seconds`` for the rows of a segment; 0: not known."""
    row_seconds = seconds / max(1, len(message.ids))
    if not seconds or row_seconds == state.row_seconds:
        return state
    return replace(state, row_seconds=row_seconds)


def _segment_received(state: VerifyState, peer: Rank, message: Segment) -> VerifyState:
    """Book a segment of a link. Raises ``RemoteProtocolError`` for one too many, or for more of
    them announced than there is credit for."""
    check_owner(message.session, peer)
    inflow = state.inflows.get(peer)
    if inflow is None or inflow.received >= inflow.granted:
        raise RemoteProtocolError("segment without credit", peer=peer)
    received = inflow.received + 1
    if message.batch_remaining > inflow.granted - received:
        raise RemoteProtocolError("more segments announced than there is credit for", peer=peer)
    return put(state, peer, replace(inflow, received=received, expected=message.batch_remaining))


def _has_tokens(session: StageSession | None, message: Segment, first: bool) -> bool:
    """Whether the tokens are there if, and only if, they are needed. Of a session that is over
    nobody knows any more."""
    needed = first or (session is not None and session.tokens_travel)
    return bool(message.tokens) == needed or (session is None and not first)


def _too_large(session: StageSession, before: Iterable[Waiting], new: Waiting) -> str:
    """What is wrong where a session has more live nodes than it was admitted for; empty where it
    has not. On the first stage alone: there no prune is overtaken by what was sent after it."""
    slots = session.slots.used + sum([len(waiting.ids) for waiting in (*before, new)])
    if not session.most_slots or slots <= session.most_slots:
        return ""
    return (
        f"session {session.session} has {slots} live nodes, and was opened for {session.most_slots}"
    )


def _refuse_orphan(
    state: VerifyState, peer: Rank, message: Segment, wrong: str
) -> tuple[VerifyState, Effects]:
    """A node follows its parent on every link, so a live node's parent is here, and it is not.

    Where a stage has passed it on it had its parent there: the session's draft node has told the
    stages different things. Its session ends, and it is told why; the link between the stages is
    everybody's and stays.
    """
    if is_draft(peer):
        raise RemoteProtocolError(wrong, peer=peer)
    state, effects = closed(state, Close(message.session))
    state, granted = grant(state, (peer,))
    return state, (*effects, *granted, Send(owner(message.session), Fault("protocol", wrong)))


# --- The verify stage as a machine: segments in, forward passes, segments or verdicts out.
# Law of this package: structure is decided on the draft node alone. A stage knows parents and
# what is alive, applies a prune the moment it comes (waiting segments lose their dead rows, rows
# that die during a pass are dropped before they are sent on), and never waits for anybody but the
# next stage's credit. Several draft nodes may share a stage: each speaks of its own sessions, and
# what it does or leaves undone touches no other's. Pure: no clock, no sockets, no tensors.


class VerifyMachine:
    """The role ``verify``."""

    def __init__(self, config: VerifyConfig) -> None:
        self.config = config

    def initial(self) -> VerifyState:
        """A stage that has met nobody yet."""
        seconds = [microseconds / 1e6 for microseconds in self.config.tried_microseconds]
        return VerifyState(self.config, cost=PassCost.from_trial(self.config.tried_rows, seconds))

    def step(self, state: VerifyState, event: Input, now: float) -> tuple[VerifyState, Effects]:
        """React to one input. Raises ``RemoteProtocolError`` for what a peer must not say."""
        # In the order of how often they come.
        match event:
            case Received():
                state, effects = _received(state, event, now)
            case Computed():
                if not isinstance(event.job, Forward | Batch):
                    raise LocalProtocolError("a stage asks for no other result than a pass's")
                state, effects = computed(state, event.job, event.result, event.seconds, now)
            case LinkUp(peer):
                state, effects = joined(state, peer)
            case LinkDown(peer):
                state, effects = lost(state, peer)
            case TaskDone():
                state, effects = planning.planned(state, event, now)
            case TimerFired(timer) if timer == BATCH_DEADLINE:
                state, effects = planning.deadline_passed(state, now)
            case TimerFired() | Submitted() | Cancelled() | Stopped():
                raise LocalProtocolError(f"a stage has no use for {type(event).__name__}")
            case _:
                assert_never(event)
        if state.schedule.members:
            state, more = planning.update_plan(state, now)
            effects += more
        state, more = serve(state, now)
        return state, effects + more


def _received(state: VerifyState, event: Received, now: float) -> tuple[VerifyState, Effects]:
    config, peer, message = state.config, event.peer, event.message
    match message:
        case Segment() if config.fed_by(peer):
            return arrived(by_line(state, message, event.seconds), peer, message, event.tensor, now)
        case Credit() if peer == config.after and not config.last:
            if message.limit < state.allowed:
                raise RemoteProtocolError("credit was taken back", peer=peer)
            state = replace(state, allowed=message.limit, onward_row_seconds=message.row_seconds)
            return send_parked(state, now, waited=True)
        case PruneIndices(session) if is_draft(peer):
            check_owner(session, peer)
            return pruned(state, message)
        case Open() if config.fed_by(peer):
            check_owner(message.session, peer)
            if message.common_prefix:
                check_owner(message.parent_session, peer)
            return opened(state, peer, message)
        case Close(session) if is_draft(peer):
            check_owner(session, peer)
            return closed(state, message)
        case Floor(first) if is_draft(peer):
            check_owner(first, peer)
            state, effects = raise_floor(state, peer, first)
            return state, (*effects, ready(state, peer))
        case Rates(session) if config.rank == 1 and is_draft(peer):
            check_owner(session, peer)
            return planning.rates_received(state, message), ()
        case PassTimes(rank) if config.rank == 1 and is_draft(peer) and 1 < rank <= config.stages:
            return planning.pass_times_received(state, peer, message), ()
        case _:
            raise RemoteProtocolError(f"unexpected {type(message).__name__}", peer=peer)
