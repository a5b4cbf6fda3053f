"""Which queued requests get a session: admission by cache memory (SpecPipe 4.5).

A session is admitted when every stage has room for the most it can come to, so none is ever thrown
out for want of memory, and none that runs is slowed down by one that waits. Room is counted in
blocks of cache slots (PagedAttention). Requests are admitted in the order in which they came: a
large one is not overtaken for ever by small ones.
"""

from __future__ import annotations

from msgspec.structs import asdict, replace

from asyncspec.core import tree as trees
from asyncspec.core.feature_log import FeatureLog
from asyncspec.core.kept_states import kept_state
from asyncspec.core.kv_slots import whole_blocks
from asyncspec.core.machine import Effects, Request, Send
from asyncspec.policy.base import max_tree_nodes
from asyncspec_nodes.roles.draft import disk_cache, lifecycle, prefix_cache, recovery
from asyncspec_nodes.roles.draft.session import (
    FIRST,
    CachedPrompt,
    DraftSession,
    DraftState,
    QueuedRequest,
    slots_needed,
)
from asyncspec_protocol.clients import TOO_LARGE
from asyncspec_protocol.ids import NodeId, SessionId
from asyncspec_protocol.messages import Open


def open_sessions(state: DraftState, now: float) -> tuple[DraftState, Effects]:
    """Open sessions for queued requests, in their order, as far as there is room. A request that
    waits for a prompt that another session is reading lets others pass."""
    effects: Effects = ()
    max_sessions = state.config.max_sessions
    while state.up and len(state.sessions) < max_sessions:
        state, queued = _next(state)
        if queued is None or not recovery.may_open(state, queued):
            break
        left = tuple(other for other in state.backlog if other is not queued)
        if (asked := _ask_disks(state, queued, now)) is not None:
            if asked[0] is state:
                break  # room is being made
            state, sends = asked
            effects += sends
            continue
        queued = replace(queued, request=_fitted(state, queued))
        error = state.memory_bound.refusal(queued.request.prompt, queued.given)
        if error := error or refusal(state, queued.request):
            state = replace(state, backlog=left)
            effects = (*effects, lifecycle.unserved(state, queued, "error", error, now, TOO_LARGE))
        elif has_room(state, queued.request):
            state, opened = _open(replace(state, backlog=left), queued, now)
            effects += opened
        elif prompts := _evictable_for(state, queued.request):
            # A request that waits is worth more than one that may come.
            state, dropped = lifecycle.drop_prompts(state, prompts[:1])
            effects += dropped
        else:
            break
    return state, effects


def _next(state: DraftState) -> tuple[DraftState, QueuedRequest | None]:
    """The first request that waits for no prompt being read. The session it waits for is noted, as
    prompts are long and would be compared again at every input."""
    for place, queued in enumerate(state.backlog):
        if prefix_cache.awaits_prefix(state, queued):
            continue
        pending = prefix_cache.prefix_in_progress(state, prefix_cache.prompt_key(state, queued))
        if pending is None:
            return state, queued
        backlog = list(state.backlog)
        backlog[place] = replace(queued, pending_prefix=pending)
        state = replace(state, backlog=tuple(backlog))
    return state, None


def _ask_disks(
    state: DraftState, queued: QueuedRequest, now: float
) -> tuple[DraftState, Effects] | None:
    """Have the stages read a request's prompt from disk before it is opened. None: that is not
    worth it, or there is never room for both. The same state: there is no room yet."""
    prompt = disk_cache.worth_asking(state, queued)
    if prompt is None:
        return None
    pending = disk_cache.in_progress(state, prompt)
    name = prompt.session if pending is None else pending
    waits = replace(queued, pending_prefix=name, disk_asked=pending is None)
    backlog = tuple(waits if other is queued else other for other in state.backlog)
    if pending is not None:
        return replace(state, backlog=backlog), ()
    both = replace(state, restoring={**state.restoring, prompt.session: prompt})
    if has_room(both, queued.request):
        return disk_cache.begin(replace(state, backlog=backlog), prompt, now)
    if prompts := _evictable_for(both, queued.request):
        return lifecycle.drop_prompts(state, prompts[:1])
    soon = replace(both, pending_releases=())
    return (state, ()) if has_room(soon, queued.request) else None


def _open(state: DraftState, queued: QueuedRequest, now: float) -> tuple[DraftState, Effects]:
    config, request, resumed = state.config, queued.request, queued.given
    policy = config.policies[request.policy]
    features = request.features or (state.features if policy.uses_draft else ())
    match = prefix_cache.longest_match(state, prefix_cache.prompt_key(state, queued))
    prefix = request.prompt + resumed
    last, slots = NodeId(len(prefix) - 1), _needed(state, request)
    # What later sessions find is mostly what the earlier ones have read.
    shared = 0 if queued.counters.sessions else match.common_prefix
    counters = queued.counters.plus(sessions=1, shared=shared)
    if counters.opened is None:
        counters = replace(counters, opened=now)
    counters = counters.on_processors(state.layer_processors, continued=bool(resumed))
    log = None
    if request.features:
        log = FeatureLog.passing(len(prefix))
    elif features:
        log = FeatureLog.start(len(prefix), match.features, match.retained, slots)
    session = DraftSession(
        session=state.next_session,
        request=request,
        policy=policy,
        stages=config.stages,
        prefix=prefix,
        resumed=resumed,
        tree=trees.new_tree(last, prefix[-1], len(prefix) - 1),
        unsent=(last,),
        parent_session=match.parent_session,
        root_parent=NodeId(len(prefix) - 2),
        next_node=NodeId(len(prefix)),
        prefilled=match.common_prefix,
        kept_state=kept_state(len(prefix), match.common_prefix),
        features=log,
        counters=counters,
    )
    message = Open(
        session=session.session,
        prompt_length=len(prefix),
        capacity=len(request.prompt) + request.max_new_tokens,
        max_tree_nodes=max_tree_nodes(policy, config.stages),
        resumed_tokens=len(resumed),
        features=features,
        top_logprobs=session.top_logprobs,
        log_probs=request.log_probs,
        parent_session=match.parent_session,
        common_prefix=match.common_prefix,
        coalesce=policy.coalesce,
        prompt_logprobs=queued.prompt_logprobs,
        stored_as=disk_cache.stored_as(state, session),
        **asdict(request.sampling),
    )
    state = replace(
        state,
        next_session=SessionId(state.next_session + 1),
        memory_bound=state.memory_bound.opened(),
    )
    return state.with_session(session), (Send(FIRST, message),)


def slots_total(state: DraftState) -> int | None:
    """Slots of the smallest stage; None where none has a bound."""
    stages = state.config.stages
    return min((n for rank, n in state.slots.items() if n and rank <= stages), default=None)


def slots_used(state: DraftState) -> int:
    """What open sessions may come to, cached prompts, and what is not released everywhere."""
    sessions = sum(one.slots for one in state.sessions.values())
    cached = sum(one.slots for one in (*state.cached_prompts, *state.restoring.values()))
    return sessions + cached + sum(one.slots for one in state.pending_releases)


def has_room(state: DraftState, request: Request) -> bool:
    """Whether there is room for a request now, at the stages and at the token source, which holds
    a cache for each session that drafts and the features of cached prompts."""
    bound, needed = slots_total(state), _needed(state, request)
    if state.config.keeps_states:
        # What is cached has states as sessions have.
        held = len(state.sessions) + len(state.cached_prompts) + len(state.pending_releases)
        if held >= state.config.max_sessions:
            return False
    if bound is not None and slots_used(state) + needed > bound:
        return False
    if (source := _source_slots(state, request)) is None:
        return True
    drafting = sum(one.slots for one in state.sessions.values() if one.policy.uses_draft)
    prompts = (*state.cached_prompts, *state.restoring.values())
    cached = sum(whole_blocks(prompt.retained) for prompt in prompts)
    return drafting + cached + needed <= source


def _evictable_for(state: DraftState, request: Request) -> tuple[CachedPrompt, ...]:
    """Cached prompts to drop for a request, oldest first; none where that would not help."""
    then = replace(state, pending_releases=())
    if has_room(then, request):
        return ()
    free = prefix_cache.evictable(state)
    left = tuple(one for one in state.cached_prompts if one not in free)
    return free if free and has_room(replace(then, cached_prompts=left), request) else ()


def refusal(state: DraftState, request: Request) -> str:
    """Why a request can never be admitted; empty where it may be."""
    bound, needed = slots_total(state), _needed(state, request)
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


def _fitted(state: DraftState, queued: QueuedRequest) -> Request:
    """A request, where its user has set no bound, of as many tokens as the caches can hold; in any
    case of fewer than a stage has ended for."""
    request, bound = queued.request, state.memory_bound.most_tokens
    if bound and (left := bound - len(request.prompt)) > len(queued.given):
        request = replace(request, max_new_tokens=min(request.max_new_tokens, left))
    bounds = [b for b in (slots_total(state), _source_slots(state, request)) if b is not None]
    if not request.unbounded or not bounds:
        return request
    excess = _needed(state, request) - min(bounds)
    if excess <= 0:
        return request
    fewest = len(request.given) + 1
    room = request.max_new_tokens - whole_blocks(excess)
    return replace(request, max_new_tokens=max(fewest, room))


def _needed(state: DraftState, request: Request) -> int:
    config = state.config
    return slots_needed(request, config.policies[request.policy], config.stages)


def _source_slots(state: DraftState, request: Request) -> int | None:
    """Slots of the token source; None where it has no bound, or the request drafts nothing."""
    config = state.config
    slots = config.slots if config.source is None else state.slots.get(config.source, 0)
    return slots if slots and config.policies[request.policy].uses_draft else None
