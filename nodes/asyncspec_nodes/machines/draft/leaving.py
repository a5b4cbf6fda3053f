"""What is over stays in the books until every stage has freed it.

A ``Close`` goes straight to every stage, and the ``Open`` of whatever takes the place goes through
those before it. Where the straight line is the longer one a stage would hear of the new session
first, and hold both. So slots are free when the stages have said so: with the session's account, or
with the answer to a ``Floor`` where a break of the pipeline has left nobody to give one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from asyncspec_nodes.machines.draft.admission import slots_kept, slots_needed
from asyncspec_nodes.machines.draft.session import DraftSession
from asyncspec_nodes.machines.draft.state import DraftState, Kept, Leaving
from asyncspec_protocol.ids import Rank, SessionId
from asyncspec_protocol.messages import Closed


def leave(state: DraftState, session: DraftSession) -> DraftState:
    """A session is over."""
    slots = slots_needed(session.request, session.policy, session.stages)
    return _with(state, Leaving(session.session, slots, state.telling))


def leave_prompts(state: DraftState, prompts: Sequence[Kept]) -> DraftState:
    """Prompts are kept no longer."""
    names = {one.session for one in prompts}
    going = [Leaving(one.session, slots_kept(one), state.telling, prompt=True) for one in prompts]
    left = tuple(one for one in state.kept if one.session not in names)
    return _with(replace(state, kept=left), *going)


def freed(state: DraftState, account: Closed) -> DraftState:
    """A stage has freed a session; and the prompt that was kept of it, unless it says that this
    stays."""
    name, kept = account.session, account.kept
    return _without(
        state, account.rank, lambda one: one.session == name and not (one.prompt and kept)
    )


def freed_below(state: DraftState, rank: Rank, floor: SessionId) -> DraftState:
    """A stage has nothing of all sessions below ``floor``, and never will have."""
    return _without(state, rank, lambda one: one.session < floor)


def _with(state: DraftState, *going: Leaving) -> DraftState:
    return replace(state, leaving=state.leaving + tuple(one for one in going if one.missing))


def _without(state: DraftState, rank: Rank, free: Callable[[Leaving], bool]) -> DraftState:
    if not state.leaving:
        return state
    told = [
        replace(one, missing=one.missing - {rank}) if free(one) else one for one in state.leaving
    ]
    return replace(state, leaving=tuple(one for one in told if one.missing))
