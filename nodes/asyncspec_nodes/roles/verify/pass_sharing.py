"""Whether the first stage's next pass waits for sessions that are about to come back.

Sessions whose segments come while others are computed go in a pass of their own, come back in time
for one of their own, and never share one: a round takes a pass more than it need. To wait once for
the time that a session is away after its pass puts two such groups together for good.

With ``away`` the seconds from the end of a session's pass here to its next segment, and P(r) those
of a pass of r rows, a round of all sessions takes::

    round = max(away + max P(group), sum of P(group) over the groups)

that is, until a session is back, or until the stage has computed all groups: no wait pays where the
groups do not fill the stage. A group that joins the next pass changes the sum, and what its rows
cost at later stages adds to ``away``. The pass waits for the groups that shorten a round most, at
most some rounds' gain and a pass's time. A session that is not back in time is away for longer, and
is not waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.cost_model.passes import PassSeconds, interpolate
from asyncspec.core.cost_model.return_time import ReturnTime
from asyncspec.core.machine import Effects, SetTimer
from asyncspec_nodes.roles.verify.session import NextPass, Pass, VerifyState, Waiting, is_prefill
from asyncspec_protocol.ids import SessionId

SHARE_DEADLINE = "share deadline"
"""The timer of a pass that waits."""


def share_deadline(state: VerifyState, next_pass: NextPass, start: float) -> float | None:
    """Until when the next pass, which could begin at ``start``, waits; None where it does not. With
    more in the queue than it takes there is work for the time until others come."""
    waiting, sessions = state.waiting, state.sessions
    if state.config.rank != 1 or next_pass.queue or not state.cost.sizes:
        return None
    if len(sessions) == 1 or state.schedule.members:
        return None
    if waiting is not None and waiting.over:
        return None
    parts = next_pass.planned.parts
    if any(is_prefill(part.segment, sessions[part.segment.session]) for part in parts):
        return None
    ready, running = _rows(next_pass.planned), _rows(state.running)
    away: list[ReturnTime] = []
    for name, session in sessions.items():
        returns = session.returns
        if name in running:
            returns = returns.ended(start, running[name])
        if name not in ready and returns.left is not None and returns.latest > start:
            away.append(returns)
    if not away:
        return None
    since = start if waiting is None else waiting.since
    seconds = interpolate(*state.cost.averages())
    return best_deadline(sum(ready.values()), away, seconds, state.config.stages, since)


def _rows(current: Pass | None) -> Mapping[SessionId, int]:
    """Rows of each session in a pass."""
    rows: dict[SessionId, int] = {}
    for part in () if current is None else current.parts:
        name = part.segment.session
        rows[name] = rows.get(name, 0) + len(part.segment.ids)
    return rows


def best_deadline(
    rows: int, away: Sequence[ReturnTime], seconds: PassSeconds, stages: int, since: float
) -> float | None:
    """Until when a pass of so many rows, which could begin ``since``, waits for some of the
    sessions that are ``away``, at least one; None where that brings nothing."""
    groups: dict[float | None, int] = {}
    for absent in away:
        groups[absent.left] = groups.get(absent.left, 0) + absent.rows
    alone, longest = seconds(rows), max([absent.seconds for absent in away])
    each = {left: seconds(count) for left, count in groups.items()}
    passes = [alone, *each.values()]
    apart = max(longest + max(passes), sum(passes))
    best, until, joined = 0.0, None, 0
    for absent in sorted(away, key=lambda absent: absent.latest):
        joined += absent.rows
        groups[absent.left] -= absent.rows
        if others := groups[absent.left]:
            each[absent.left] = seconds(others)
        else:
            each.pop(absent.left, None)
        joint = seconds(rows + joined)
        passes = [joint, *each.values()]
        later = (stages - 1) * (joint - max(alone, seconds(joined)))
        gain = apart - max(longest + later + max(passes), sum(passes))
        worth = PARAMETERS.sharing_rounds * gain - (absent.latest - since)
        if worth > best and absent.latest - since < alone:
            best, until = worth, absent.latest
    return until


def wait_until(state: VerifyState, until: float, now: float) -> tuple[VerifyState, Effects]:
    """The next pass waits."""
    waiting = state.waiting
    if waiting is not None and waiting.until == until:
        return state, ()
    since = now if waiting is None else waiting.since
    return replace(state, waiting=Waiting(since, until)), (SetTimer(SHARE_DEADLINE, until),)


def share_deadline_passed(state: VerifyState) -> VerifyState:
    """The next pass, if there is still one, has waited long enough."""
    waiting = state.waiting
    if waiting is None:
        return state
    return replace(state, waiting=replace(waiting, over=True) if state.queue else None)
