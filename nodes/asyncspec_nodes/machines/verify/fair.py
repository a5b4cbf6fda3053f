"""How many rows a pass should have, so that sessions which share one do not stay together for ever.

Sessions that share a pass come back, are drafted for and are sent together, and whatever meets them
at the first stage stays with them from then on: nothing parts them again. Where rows are free that
costs nothing. Where rows cost, a few long passes go round and most stages stand still. So the
first stage, which makes the passes, gives each stage an even part of all rows to work on. Pure.
"""

from __future__ import annotations

from asyncspec_nodes.machines.verify.batch import prompt
from asyncspec_nodes.machines.verify.state import VerifyState
from asyncspec_protocol.ids import SessionId


def fair_rows(state: VerifyState) -> int | None:
    """Rows of the first stage's next pass that sessions should share; None: any number, because who
    is verified together is decided by the stage before, or by a plan (DiP-SD) or what plans are
    compared with: everybody who is ready.

    An even part of the rows that wait or are under way, or half of those that could be in the pass,
    if these are more: more wait for a first stage that is slower than the others than for each of
    those, and it should not take them in small passes. A group that is too large is a fair one
    after a few times round.
    """
    config, sessions = state.config, state.sessions
    if config.rank != 1 or state.rota.members:
        return None
    waiting, first = 0, dict[SessionId, int]()
    for one in state.queue:
        if not prompt(one, sessions[one.session]):
            waiting += len(one.ids)
            first.setdefault(one.session, len(one.ids))
    under_way = sum([len(session.slots.seats) for session in sessions.values()])
    return max(-(-(waiting + under_way) // config.stages), -(-sum(first.values()) // 2))
