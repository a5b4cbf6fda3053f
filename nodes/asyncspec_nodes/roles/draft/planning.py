"""What this node is measured to be, and when the first stage is told so (DiP-SD at run time).

Only sessions whose policy may be planned are measured, and only they cost a message.
"""

from __future__ import annotations

from msgspec.structs import replace

from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.machine import Send
from asyncspec.dipsd.measured import ENOUGH, AcceptanceCounts, DraftMeasurements
from asyncspec.source.batch import Answers
from asyncspec_nodes.roles.draft.speculation import Accepted
from asyncspec_nodes.roles.draft.state import FIRST, DraftSession, DraftState, Effects
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import PassTimes, Rates, Schedule, Verdict


def planned(session: DraftSession) -> bool:
    """Whether a session takes part now: its answer has begun."""
    return session.policy.plannable and session.decoding


def verified(state: DraftState, message: Verdict, now: float) -> DraftState:
    """What of a segment's way was links, if its session wants to know."""
    session = state.sessions.get(message.session)
    if session is None or not message.stage_seconds or not planned(session):
        return state
    seconds = now - session.sent_at - message.stage_seconds
    return replace(state, measured=state.measured.with_link(seconds))


def advanced(state: DraftState, session: DraftSession, accepted: Accepted) -> DraftState:
    """A round is over: how much of its draft was right."""
    if not planned(session) or not (drafted := _tried(session)):
        return state
    measured = state.measured.with_round(session.session, drafted, accepted.hits)
    return replace(state, measured=measured)


def _tried(session: DraftSession) -> int:
    """Levels of a tree that its verdicts speak of: those that were sent, and the next one where
    there is any."""
    nodes, root = session.tree.nodes, session.tree.root
    sent = max(nodes[node].position for node in session.sent) - nodes[root].position
    return min(session.levels, sent + 1)


def drafted(state: DraftState, batch: Answers, seconds: float) -> DraftState:
    """The source has drafted for some sessions together: as long as for the longest of them."""
    lengths = [_length(state.sessions.get(answer.session)) for _, answer in batch]
    if not lengths or not all(lengths):
        return state  # others' trees and prompts take what they take
    return replace(state, measured=state.measured.with_draft(max(lengths), seconds))


def _length(session: DraftSession | None) -> int:
    """Tokens of the draft that is asked for a session; 0 where it is none."""
    if session is None or not planned(session) or session.draft_request is None:
        return 0
    growth, abandoned = session.draft_request.growth, session.draft_request.abandoned
    return 0 if growth is None or abandoned else growth.shape.depth


def scheduled(state: DraftState, message: Schedule) -> DraftState:
    """The first stage has planned; sessions that are over no longer mind."""
    session = state.sessions.get(message.session)
    if session is None:
        return state
    return state.with_session(replace(session, planned_length=message.length))


def tell(state: DraftState) -> tuple[DraftState, Effects]:
    """What the first stage does not know of the sessions that take part."""
    measured = state.measured
    if gone := measured.users.keys() - state.sessions.keys():
        measured = measured.without(gone)
        state = replace(state, measured=measured)
    taking_part = [session for session in state.sessions.values() if planned(session)]
    if not taking_part:
        return state, ()
    effects: Effects = ()
    everybody = measured.everybody
    for session in taking_part:
        rates = rates_of(measured, session, everybody)
        told = session.told
        if told is None:
            effects += _tables(state)
        if told is None or news(told, rates):
            state = state.with_session(replace(session, told=rates))
            effects += (Send(FIRST, rates),)
    return state, effects


def _tables(state: DraftState) -> Effects:
    return tuple(Send(FIRST, told) for rank, told in state.costs.times.items() if rank != FIRST)


def pass_on(state: DraftState, message: PassTimes) -> Effects:
    """The first stage plans for all stages, and hears of the later ones from draft nodes: it is
    linked to none but the next."""
    if message.rank == Rank(FIRST) or not any(map(planned, state.sessions.values())):
        return ()
    return (Send(FIRST, message),)


def rates_of(
    measured: DraftMeasurements, session: DraftSession, everybody: AcceptanceCounts
) -> Rates:
    """What is told of a session; ``everybody``: all of the node's users together."""
    chance = measured.chance(session.session, everybody)
    if not measured.timed or chance.rounds < ENOUGH:
        return Rates(session.session)
    call, token = measured.drafting.fit
    return Rates(
        session.session,
        int(chance.rounds),
        chance.low,
        token,
        call,
        measured.links.fit[1],
        measured.drafts_off.relative,
        chance.mean,
        chance.high,
        measured.links_off.relative,
    )


def news(told: Rates, now: Rates) -> bool:
    """Whether it has changed noticeably."""
    if bool(told.rounds) != bool(now.rounds):
        return True
    change = PARAMETERS.report_change
    room = max(0.02, change * 2 * min(told.alpha, 1 - told.alpha))
    if max(abs(now.alpha - told.alpha), abs(now.mean - told.mean)) > room:
        return True
    shaken = (now.jitter - told.jitter, now.link_jitter - told.link_jitter)
    if max(map(abs, shaken)) > change / 2:
        return True
    before = (told.token_seconds, told.call_seconds, told.link_seconds)
    after = (now.token_seconds, now.call_seconds, now.link_seconds)
    # What matters is a share of a whole round.
    worth = change * max(sum(before), 1e-9)
    return any(abs(a - b) > worth for a, b in zip(after, before, strict=True))
