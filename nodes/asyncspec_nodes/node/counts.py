"""What a machine of each role has in hand, for whoever inspects its node."""

from __future__ import annotations

from typing import Any

from asyncspec_nodes.machines.draft.admission import slots_taken
from asyncspec_nodes.machines.draft.requests import who_is_missing
from asyncspec_nodes.machines.draft.state import DraftState
from asyncspec_nodes.machines.verify.state import VerifyState
from asyncspec_nodes.node.inspector import Counts


def counts(state: Any) -> Counts:
    """Of a draft node, a stage, or a token source (which has none of these)."""
    if isinstance(state, DraftState):
        missing = "" if state.up else who_is_missing(state)
        taken = slots_taken(state)
        return Counts(len(state.sessions), len(state.backlog), 0, taken, missing)
    if isinstance(state, VerifyState):
        slots = sum(session.slots.used for session in state.sessions.values())
        return Counts(len(state.sessions), len(state.queue), slots, state.config.slots)
    return Counts()
