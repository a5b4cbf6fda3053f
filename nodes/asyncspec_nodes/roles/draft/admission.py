"""Which requests there is memory for (SpecPipe 4.5; paged accounting as in PagedAttention).

A session is admitted when every stage has room for the most it can come to; so no session is ever
thrown out for want of memory, and none that runs can be slowed down by one that waits. Room is
counted in blocks of cache slots. Requests are admitted in the order in which they came: a large one
is not overtaken for ever by small ones.
"""

from __future__ import annotations

from msgspec.structs import replace

from asyncspec.core.machine import Request
from asyncspec.policy.base import Policy, max_tree_nodes
from asyncspec_nodes.roles.draft import prefix_cache
from asyncspec_nodes.roles.draft.state import DraftState, Kept

BLOCK = 64
"""Slots of a block; caches grow by whole ones."""


def slots_needed(request: Request, policy: Policy, stages: int) -> int:
    """The most slots that a session of a request takes on any stage, in whole blocks: prompt,
    answer, and what its policy has in a tree at most."""
    return _blocks(len(request.prompt) + request.max_new_tokens + max_tree_nodes(policy, stages))


def slots_in_all(state: DraftState) -> int | None:
    """What the smallest stage has; None where none has a bound."""
    stages = state.config.stages
    bounds = [slots for rank, slots in state.slots.items() if slots and rank <= stages]
    return min(bounds) if bounds else None


def slots_kept(prompt: Kept) -> int:
    """The slots of a prompt that is kept, in whole blocks."""
    return _blocks(len(prompt.prefix))


def slots_taken(state: DraftState) -> int:
    """What the sessions that are open may come to, the prompts that are kept, and what is over and
    not free on every stage."""
    open_ones = (slots_needed(s.request, s.policy, s.stages) for s in state.sessions.values())
    leaving = sum(one.slots for one in state.leaving)
    return sum(open_ones) + sum(map(slots_kept, state.kept)) + leaving


def fits(state: DraftState, request: Request) -> bool:
    """Whether there is room for a request now, at the stages and where it drafts."""
    bound, source = slots_in_all(state), _source_slots(state, request)
    needed = _needed(state, request)
    return (bound is None or slots_taken(state) + needed <= bound) and (
        source is None or _source_taken(state) + needed <= source
    )


def prompts_in_the_way(state: DraftState, request: Request) -> tuple[Kept, ...]:
    """Prompts that could be given up for a request, the oldest first; none where it would have to
    wait all the same, or only waits for what is leaving."""
    then = replace(state, leaving=())
    if fits(then, request):
        return ()
    free = prefix_cache.not_needed(state)
    names = {one.session for one in free}
    left = tuple(one for one in state.kept if one.session not in names)
    return free if free and fits(replace(then, kept=left), request) else ()


def too_large(state: DraftState, request: Request) -> str:
    """Why a request will never be admitted; empty where it may be."""
    bound, needed = slots_in_all(state), _needed(state, request)
    source = _source_slots(state, request)
    if source is not None and needed > source:
        return (
            f"prompt, answer and draft tree may take {needed} slots of the token source's caches, "
            f"which have {source}; ask for fewer tokens or for policy autoregressive, or raise "
            "[limits] draft_mib there"
        )
    if bound is None or needed <= bound:
        return ""
    return (
        f"prompt, answer and draft tree may take {needed} cache slots, and the smallest stage has "
        f"{bound}; ask for fewer tokens or for a policy with smaller trees, or raise [limits] "
        "cache_mib there"
    )


def _needed(state: DraftState, request: Request) -> int:
    config = state.config
    return slots_needed(request, config.policies[request.policy], config.stages)


def _source_slots(state: DraftState, request: Request) -> int | None:
    """Slots that the token source has; None where it has no bound, or the request does not ask
    it."""
    config = state.config
    slots = config.slots if config.source is None else state.slots.get(config.source, 0)
    return slots if slots and config.policies[request.policy].uses_draft else None


def _source_taken(state: DraftState) -> int:
    """What the sessions that draft may come to at the token source: it has one cache each. Of the
    prompts that are kept it has nothing, but their features are held for it."""
    kept = sum(slots_kept(one) for one in state.kept if one.features)
    drafting = (one for one in state.sessions.values() if one.policy.uses_draft)
    return kept + sum(slots_needed(s.request, s.policy, s.stages) for s in drafting)


def _blocks(slots: int) -> int:
    return -(-slots // BLOCK) * BLOCK
