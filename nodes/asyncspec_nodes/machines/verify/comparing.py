"""What users are brought while a plan is in use and while none is, by what the first stage sees:
how far a session's committed path has come when its next segment is here."""

from __future__ import annotations

from msgspec.structs import replace

from asyncspec_nodes.machines.verify.rota import Progress, Rota
from asyncspec_protocol.ids import SessionId

AWAY = 8.0
"""A round of so many periods is none: its user was away."""


def count(rota: Rota, session: SessionId, committed: int, now: float) -> Rota:
    """A segment of a member has come: what the round before it has brought, and how long it took.

    Rounds count where they are complete, so neither who begins nor who ends nor who is not waited
    for makes a difference.
    """
    before = rota.progress.get(session)
    rota = replace(rota, progress={**rota.progress, session: Progress(now, committed)})
    rate, offence = rota.forecast.get(session), rota.offences.get(session)
    if before is None or rate is None or (offence is not None and offence.aside):
        return rota
    seconds, tokens = now - before.at, committed - before.committed
    if tokens <= 0 or seconds > AWAY * rota.period:
        return rota
    comparison = rota.comparison.brought(tokens, seconds, rate, len(rota.forecast))
    return replace(rota, comparison=comparison)
