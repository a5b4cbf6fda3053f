"""Which requests there is memory for (SpecPipe 4.5; paged accounting as in PagedAttention).

A session is admitted when every stage has room for the most it can come to; so no session is ever
thrown out for want of memory, and none that runs can be slowed down by one that waits. Room is
counted in blocks of cache slots. Requests are admitted in the order in which they came: a large one
is not overtaken for ever by small ones.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from asyncspec.actor.machine import Request
from asyncspec_nodes.machines.draft import sharing
from asyncspec_nodes.machines.draft.state import DraftState, Kept

BLOCK = 64
"""Slots of a block; caches grow by whole ones."""

TREE = 64
"""Nodes of a draft tree that are under way at each stage, most of the time."""


def slots_needed(request: Request, stages: int) -> int:
    """The most slots that a session of a request takes on any stage, in whole blocks: prompt,
    answer and tree."""
    return _blocks(len(request.prompt) + request.max_new_tokens + TREE * (stages + 1))


def slots_in_all(state: DraftState) -> int | None:
    """What the smallest stage has; None where none has a bound."""
    bounds = [slots for slots in state.slots.values() if slots]
    return min(bounds) if bounds else None


def slots_taken(state: DraftState) -> int:
    """What the sessions that are open may come to, those whose end not every stage has told, and
    the prompts that are kept."""
    kept = sum(_blocks(len(one.prefix)) for one in state.kept)
    return kept + sum(slots_needed(request, state.config.stages) for request in _holders(state))


def fits(state: DraftState, request: Request) -> bool:
    """Whether there is room for a request now."""
    bound = slots_in_all(state)
    needed = slots_needed(request, state.config.stages)
    return bound is None or slots_taken(state) + needed <= bound


def prompts_in_the_way(state: DraftState, request: Request) -> tuple[Kept, ...]:
    """Prompts that could be given up for a request, the oldest first; none where it would have to
    wait all the same."""
    free = sharing.not_needed(state)
    names = {one.session for one in free}
    left = tuple(one for one in state.kept if one.session not in names)
    return free if free and fits(replace(state, kept=left), request) else ()


def too_large(state: DraftState, request: Request) -> str:
    """Why a request will never be admitted; empty where it may be."""
    bound, needed = slots_in_all(state), slots_needed(request, state.config.stages)
    if bound is None or needed <= bound:
        return ""
    return (
        f"prompt, answer and draft tree may take {needed} cache slots, and the smallest stage has "
        f"{bound}; ask for fewer tokens, or raise [limits] cache_mib there"
    )


def _blocks(slots: int) -> int:
    return -(-slots // BLOCK) * BLOCK


def _holders(state: DraftState) -> Iterable[Request]:
    yield from (session.request for session in state.sessions.values())
    yield from (ending.session.request for ending in state.endings.values())
