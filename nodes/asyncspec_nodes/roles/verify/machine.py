"""The verify stage as a machine: segments in, forward passes, segments or verdicts out.

Structure is decided on the draft node alone. A stage knows parents and what is alive, applies a
prune the moment it comes (queued segments lose their dead rows, rows that die during a pass are
dropped before they are sent on), and waits for nothing but the next stage's credit, but for bounded
times in which other sessions come back to share a pass. Several draft nodes may share a stage: each
may name its own sessions only.

Messages stand for ``Received`` of them as events, and for ``Send`` of them as effects:

| event | handler | effects |
| --- | --- | --- |
| Segment | receive_segment | Credit Fault Compute SendClosed |
| Credit | send_computed | Segment |
| PruneIndices | receive_prune | Credit Compute Abandon |
| Open | lifecycle.open_session | Open Credit Fault Compute SendClosed |
| Close | lifecycle.close_session | Credit Compute Abandon SendClosed |
| Floor | lifecycle.raise_floor | Ready Credit Compute Abandon SendClosed |
| Restore | lifecycle.restore | ReadPrefix SendClosed |
| PrefixRead | stored_prefixes.read | Compute SendClosed |
| PrefixWritten | stored_prefixes.written | |
| Rates | planning.rates_received | |
| PassTimes | planning.pass_times_received | |
| Computed | pass_done | Verdict PassTimes SendClosed |
| | stored_prefixes.exported stored_prefixes.imported | WritePrefix SendClosed |
| LinkUp | lifecycle.link_up | Ready Credit PassTimes |
| LinkDown | lifecycle.link_down | Ready Credit Compute Abandon SendClosed |
| TaskDone | planning.plan_done | Schedule SetTimer |
| TimerFired | planning.deadline_passed share_deadline_passed | SetTimer |
| any | planning.update_plan schedule | Segment Credit Schedule Compute RunNext RunTask SetTimer |
| any | stored_prefixes.advance | WritePrefix Compute |
"""

from __future__ import annotations

from msgspec.structs import replace

from asyncspec.core.cost_model.passes import PassCost
from asyncspec.core.jobs import Batch, Export, Forward, Import
from asyncspec.core.machine import (
    Computed,
    Effects,
    Input,
    LinkDown,
    LinkUp,
    PrefixRead,
    PrefixWritten,
    Received,
    TaskDone,
    TimerFired,
)
from asyncspec_nodes.roles.verify import lifecycle, planning, stored_prefixes
from asyncspec_nodes.roles.verify.batch_schedule import BATCH_DEADLINE
from asyncspec_nodes.roles.verify.batching import schedule, send_computed
from asyncspec_nodes.roles.verify.config import VerifyConfig
from asyncspec_nodes.roles.verify.pass_sharing import SHARE_DEADLINE, share_deadline_passed
from asyncspec_nodes.roles.verify.segments import pass_done, receive_prune, receive_segment
from asyncspec_nodes.roles.verify.session import VerifyState
from asyncspec_protocol.errors import LocalProtocolError, RemoteProtocolError
from asyncspec_protocol.ids import check_owner, is_draft
from asyncspec_protocol.messages import (
    Close,
    Credit,
    Floor,
    Open,
    PassTimes,
    PruneIndices,
    Rates,
    Restore,
    Segment,
)


class VerifyMachine:
    """The role ``verify``."""

    def __init__(self, config: VerifyConfig) -> None:
        self.config = config

    def initial(self) -> VerifyState:
        """A stage without peers."""
        seconds = [microseconds / 1e6 for microseconds in self.config.tried_microseconds]
        return VerifyState(self.config, cost=PassCost.from_trial(self.config.tried_rows, seconds))

    def step(self, state: VerifyState, event: Input, now: float) -> tuple[VerifyState, Effects]:
        """Handle one input. Raises ``RemoteProtocolError`` for what a peer must not send."""
        match event:
            case Received():
                state, effects = _received(state, event, now)
            case Computed(Forward() | Batch() as job):
                state, effects = pass_done(state, event, job, now)
            case Computed(Export() as job):
                state, effects = stored_prefixes.exported(state, event, job)
            case Computed(Import() as job):
                state, effects = stored_prefixes.imported(state, event, job)
            case PrefixRead():
                state, effects = stored_prefixes.read(state, event)
            case PrefixWritten():
                state, effects = stored_prefixes.written(state, event), ()
            case LinkUp(peer):
                state, effects = lifecycle.link_up(state, peer, now)
            case LinkDown():
                state, effects = lifecycle.link_down(state, event, now)
            case TaskDone():
                state, effects = planning.plan_done(state, event, now)
            case TimerFired(timer) if timer == BATCH_DEADLINE:
                state, effects = planning.deadline_passed(state, now)
            case TimerFired(timer) if timer == SHARE_DEADLINE:
                state, effects = share_deadline_passed(state), ()
            case _:
                raise LocalProtocolError(f"a stage has no use for {type(event).__name__}")
        if state.schedule.members:
            state, more = planning.update_plan(state, now)
            effects += more
        state, more = schedule(state, now)
        effects += more
        if state.stored_prefixes.queue:
            state, more = stored_prefixes.advance(state)
            effects += more
        return state, effects


def _received(state: VerifyState, event: Received, now: float) -> tuple[VerifyState, Effects]:
    config, peer, message = state.config, event.peer, event.message
    if isinstance(message, Segment | PruneIndices | Open | Close | Restore | Rates):
        check_owner(message.session, peer)
    match message:
        case Segment() if config.is_upstream(peer):
            return receive_segment(state, event, message, now)
        case Credit() if peer == config.next_rank and not config.last:
            if message.limit < state.allowed:
                raise RemoteProtocolError("credit was taken back", peer=peer)
            state = replace(state, allowed=message.limit, onward_row_seconds=message.row_seconds)
            return send_computed(state, now, waited=True)
        case PruneIndices() if is_draft(peer):
            return receive_prune(state, message)
        case Open() if config.is_upstream(peer):
            if message.common_prefix:
                check_owner(message.parent_session, peer)
            return lifecycle.open_session(state, peer, message, now)
        case Close() if is_draft(peer):
            return lifecycle.close_session(state, message)
        case Restore() if is_draft(peer):
            return lifecycle.restore(state, peer, message, now)
        case Floor(first) if is_draft(peer):
            check_owner(first, peer)
            return lifecycle.raise_floor(state, peer, first)
        case Rates() if config.rank == 1 and is_draft(peer):
            return planning.rates_received(state, message), ()
        case PassTimes(rank) if config.rank == 1 and is_draft(peer) and 1 < rank <= config.stages:
            return planning.pass_times_received(state, peer, message), ()
        case _:
            raise RemoteProtocolError(f"unexpected {type(message).__name__}", peer=peer)
