"""How many rows a pass should have, so that sessions which share one do not stay together for ever.

Sessions that share a pass come back, are drafted for and are sent together, and whatever meets them
at the first stage stays with them from then on: nothing parts them again. Where rows are free that
costs nothing. Where rows cost, a few long passes go round and most stages stand still. So the
first stage, which makes the passes, gives each stage an even part of all rows to work on. Pure.
"""

from __future__ import annotations

from asyncspec_nodes.machines.verify.batch import Share, prompt
from asyncspec_nodes.machines.verify.session import StageSession
from asyncspec_nodes.machines.verify.state import VerifyState
from asyncspec_protocol.ids import SessionId


def fair_share(state: VerifyState) -> Share | None:
    """Rows of the first stage's next pass that sessions should share; None: any number, because who
    is verified together is decided by the stage before. So a plan decides (DiP-SD), or what plans
    are compared with: everybody who is ready. Sessions that may be planned for are exempt, and
    others share as if these were not there.

    An even part of the rows that wait or are under way, or half of those that could be in the pass,
    if these are more: more wait for a first stage that is slower than the others than for each of
    those, and it should not take them in small passes. A group that is too large is a fair one
    after a few times round.
    """
    config, exempt = state.config, state.rota.members
    if config.rank != 1:
        return None
    sessions = {name: one for name, one in state.sessions.items() if name not in exempt}
    waiting, first = 0, dict[SessionId, int]()
    for one in state.queue:
        if one.session in sessions and not prompt(one, sessions[one.session]):
            waiting += len(one.ids)
            first.setdefault(one.session, len(one.ids))
    away = [_under_way(one) for name, one in sessions.items() if name not in first]
    seats = [len(sessions[name].slots.seats) for name in first]
    even = -(-(waiting + sum(away) + sum(seats)) // config.stages)
    return Share(max(even, -(-sum(first.values()) // 2)), exempt.keys())


def _under_way(session: StageSession) -> int:
    """Rows of a session of which nothing waits. A row whose token is known already, as the only one
    of plain decoding, is no node of its tree any more."""
    seats = len(session.slots.seats)
    decoding = session.slots.committed >= session.liveness.prompt_length
    return seats or int(decoding)
