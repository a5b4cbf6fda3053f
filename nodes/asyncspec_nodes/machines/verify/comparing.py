"""What users are brought while a plan is in use and while none is, by what the first stage sees:
how far a session's committed path has come when its next segment is here."""

from __future__ import annotations

from msgspec.structs import replace

from asyncspec_nodes.machines.verify.rota import Rota
from asyncspec_protocol.ids import SessionId


def pass_time(rota: Rota, now: float) -> Rota:
    """Greedy batching would have brought something since the last time, by its forecast: to those
    who are waited for."""
    if not rota.forecast:
        return replace(rota, booked=now)
    offences = rota.offences
    rate = sum(
        [
            rate
            for session, rate in rota.forecast.items()
            if session not in offences or not offences[session].aside
        ]
    )
    comparison = rota.comparison.passed(now - rota.booked, rate)
    return replace(rota, comparison=comparison, booked=now)


def count(rota: Rota, session: SessionId, committed: int, now: float) -> Rota:
    """A segment of a user that something is forecast of: what the round before it has brought."""
    before = rota.committed.get(session)
    rota = replace(pass_time(rota, now), committed={**rota.committed, session: committed})
    offence = rota.offences.get(session)
    if before is None or committed <= before or (offence is not None and offence.aside):
        return rota
    comparison = rota.comparison.brought(committed - before, len(rota.forecast))
    return replace(rota, comparison=comparison)
