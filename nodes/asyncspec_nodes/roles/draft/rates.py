"""What this node is measured to be, and when the first stage gets a report for its planner.

Only sessions whose policy may be planned are measured, and only they cost a message.
"""

from __future__ import annotations

from msgspec.structs import replace

from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.machine import Effects, Send
from asyncspec.source.base import DraftResults
from asyncspec_nodes.roles.draft.measurements import MIN_ROUNDS, AcceptanceCounts, DraftMeasurements
from asyncspec_nodes.roles.draft.session import FIRST, DraftSession, DraftState
from asyncspec_protocol.messages import PassTimes, Rates, Verdict


def _is_planned(session: DraftSession) -> bool:
    """Whether a session takes part now: its answer has begun."""
    return session.policy.plannable and session.decoding


def count_links(state: DraftState, message: Verdict, now: float) -> DraftState:
    """Seconds of a segment and its verdict on links."""
    session = state.sessions.get(message.session)
    if session is None or not _is_planned(session):
        return state
    seconds = now - session.sent_at - message.stage_seconds
    return replace(state, measured=state.measured.with_link(seconds))


def count_round(state: DraftState, session: DraftSession, hits: int) -> DraftState:
    """A round is over. Verdicts cover the levels that were sent and the next one, if any."""
    if not _is_planned(session):
        return state
    tree = session.tree
    bottom = min(tree.bottom, max(tree.nodes[node].position for node in session.sent) + 1)
    drafted = bottom - tree.nodes[tree.root].position
    if not drafted:
        return state
    return replace(state, measured=state.measured.with_round(session.session, drafted, hits))


def count_draft(state: DraftState, batch: DraftResults, seconds: float) -> DraftState:
    """The source has drafted for some sessions together: as long as for the longest of them."""
    lengths = [_draft_length(state.sessions.get(answer.session)) for _, answer in batch]
    if not lengths or not all(lengths):
        return state  # other policies' trees and prompts have other costs
    return replace(state, measured=state.measured.with_draft(max(lengths), seconds))


def _draft_length(session: DraftSession | None) -> int:
    """Tokens of the draft requested for a session; 0 where it is none."""
    if session is None or not _is_planned(session) or session.draft_request is None:
        return 0
    growth, abandoned = session.draft_request.growth, session.draft_request.abandoned
    return 0 if growth is None or abandoned else growth.shape.depth


def pass_on(state: DraftState, message: PassTimes) -> Effects:
    """Pass on a later stage's pass times to the first, which plans and has no link to it."""
    if message.rank == FIRST or not any(map(_is_planned, state.sessions.values())):
        return ()
    return (Send(FIRST, message),)


def report_rates(state: DraftState) -> tuple[DraftState, Effects]:
    """Report to the first stage what has changed of the sessions that take part."""
    measured = state.measured
    if gone := measured.users.keys() - state.sessions.keys():
        measured = measured.without(gone)
        state = replace(state, measured=measured)
    taking_part = [session for session in state.sessions.values() if _is_planned(session)]
    if not taking_part:
        return state, ()
    effects: Effects = ()
    total = measured.total
    for session in taking_part:
        rates = _rates(measured, session, total)
        if session.reported is None:
            later = [times for rank, times in state.costs.times.items() if rank != FIRST]
            effects += tuple(Send(FIRST, times) for times in later)
        if session.reported is None or _changed(session.reported, rates):
            state = state.with_session(replace(session, reported=rates))
            effects += (Send(FIRST, rates),)
    return state, effects


def _rates(measured: DraftMeasurements, session: DraftSession, total: AcceptanceCounts) -> Rates:
    """The report on a session; ``total``: all of the node's users together."""
    chance = measured.chance(session.session, total)
    if not measured.timed or chance.rounds < MIN_ROUNDS:
        return Rates(session.session)
    call, token = measured.drafting.fit
    return Rates(
        session.session,
        int(chance.rounds),
        chance.low,
        token,
        call,
        measured.links.fit[1],
        measured.draft_deviation.relative,
        chance.mean,
        chance.high,
        measured.link_deviation.relative,
    )


def _changed(previous: Rates, current: Rates) -> bool:
    """Whether rates have changed noticeably."""
    if bool(previous.rounds) != bool(current.rounds):
        return True
    change = PARAMETERS.report_change
    room = max(0.02, change * 2 * min(previous.alpha, 1 - previous.alpha))
    if max(abs(current.alpha - previous.alpha), abs(current.mean - previous.mean)) > room:
        return True
    jitters = (current.jitter - previous.jitter, current.link_jitter - previous.link_jitter)
    if max(map(abs, jitters)) > change / 2:
        return True
    old = (previous.token_seconds, previous.call_seconds, previous.link_seconds)
    new = (current.token_seconds, current.call_seconds, current.link_seconds)
    # Each is compared with a whole round.
    return max(abs(a - b) for a, b in zip(old, new, strict=True)) > change * max(sum(old), 1e-9)
