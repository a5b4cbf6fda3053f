"""What a plan is made of: what draft nodes tell of their users, and what stages take."""

from __future__ import annotations

from msgspec.structs import replace

from asyncspec.dipsd.decide import LONGEST_MS, MOST_JITTER, Planning
from asyncspec.dipsd.told import Stages
from asyncspec.dipsd.told import question as planning
from asyncspec.pass_cost import affine
from asyncspec_nodes.machines.verify.rota import Rota, planned_with
from asyncspec_nodes.machines.verify.state import VerifyState, check_known
from asyncspec_protocol.ids import Rank, owner
from asyncspec_protocol.messages import PassTimes, Rates

MOST_ROWS_EACH = 21
"""Rows of the longest draft and its root: what larger passes take does not matter for a plan."""


LONGEST = LONGEST_MS / 1000
"""Seconds of any pass, and of any row of it."""

MOST_ROWS = 1e6


def told(state: VerifyState, message: Rates) -> VerifyState:
    """A draft node has told what it measures. Raises ``RemoteProtocolError`` for a session that
    was never opened."""
    session = message.session
    if session not in state.sessions:
        check_known(state, session, owner(session))
        return state
    members = {**state.rota.members, session: message}
    return replace(state, rota=replace(state.rota, members=members, stale=True))


def told_times(state: VerifyState, peer: Rank, message: PassTimes) -> VerifyState:
    """A draft node passes on what a later stage's passes take."""
    theirs = {**state.rota.tables.get(peer, {}), message.rank: message}
    tables = {**state.rota.tables, peer: theirs}
    return replace(state, rota=replace(state.rota, tables=tables, stale=True))


def question(state: VerifyState) -> Planning | None:
    """What there is to plan; None where nobody takes part, or some stage's passes are unknown."""
    rota = state.rota
    sessions = planned_with(rota)
    known = passes(state, len(sessions))
    if not sessions or known is None:
        return None
    rates = [rota.members[session] for session in sessions]
    return planning(rates, known, batch_rows=state.config.batch_rows)


def passes(state: VerifyState, users: int) -> Stages | None:
    """What passes take, over as many rows as so many users may have; None where some stage's are
    unknown."""
    most = max(1, users) * MOST_ROWS_EACH
    own = state.cost.averages()
    later = [_believed(state.rota, Rank(n), most) for n in range(2, state.config.stages + 1)]
    if not own[0] or None in later:
        return None
    return ((*affine(*own, most), state.cost.off.relative), *filter(None, later))


def _believed(rota: Rota, rank: Rank, most: int) -> tuple[float, float, float] | None:
    """The line of a later stage's passes. All draft nodes were told the same by that stage, so of
    what they pass on the middle is taken: one alone cannot make it longer."""
    tables = [theirs[rank] for theirs in rota.tables.values() if rank in theirs]
    lines = sorted(
        (_line(table, most) for table in tables), key=lambda line: line[0] + most / 2 * line[1]
    )
    return lines[(len(lines) - 1) // 2] if lines else None


def _line(table: PassTimes, most: int) -> tuple[float, float, float]:
    """What is said, as far as it can be so: sums of what was said may be no numbers at all."""
    seconds = [min(LONGEST, told) for told in table.seconds]
    fixed, row = affine([min(MOST_ROWS, told) for told in table.rows], seconds, most)
    return min(LONGEST, fixed), min(LONGEST, row), min(MOST_JITTER, table.jitter)
