"""Prompts that the stages have on disk, from before they were started again, say.

A request with a long prompt of which too little is in the stages' caches waits while each stage
reads what it has on disk (``Restore``). What all of them have becomes a cached prompt like any
other (``prefix_cache``). That a stage has nothing, or not the same, only costs the question: this
node keeps no list of what is stored. Where the token source reads features of the target, this
node stores them on a disk of its own, and asks that too.

Requests with a tenant are left out: the disk has no secret of their own to be encrypted with.
"""

from __future__ import annotations

from typing import cast

from msgspec.structs import replace

from asyncspec.core.feature_log import rows_between
from asyncspec.core.jobs import TensorRows
from asyncspec.core.kept_states import kept_state
from asyncspec.core.machine import Effects, PrefixRead, ReadPrefix, Send, SetTimer, WritePrefix
from asyncspec.core.prefix_keys import prefix_keys
from asyncspec_nodes.roles.draft import prefix_cache
from asyncspec_nodes.roles.draft.prefix_cache import row_count
from asyncspec_nodes.roles.draft.session import (
    CachedPrompt,
    DraftSession,
    DraftState,
    QueuedRequest,
)
from asyncspec_protocol.ids import DRAFT, Rank, SessionId
from asyncspec_protocol.limits import PREFIX_UNIT
from asyncspec_protocol.messages import Closed, Restore

MAX_WRITES = 8
"""Writes of features that wait for the disk at most: their rows stay in memory until then."""


def stored_as(state: DraftState, session: DraftSession) -> tuple[bytes, ...]:
    """The names under which stages store a session's prompt and what it has of its answer; none
    where they do not."""
    if (
        session.request.tenant
        or not _all_store(state)
        or session.length <= state.config.min_disk_prefix
    ):
        return ()
    # No stage has computed the last token.
    return prefix_keys((session.prefix + session.committed)[:-1])


def worth_asking(state: DraftState, queued: QueuedRequest) -> CachedPrompt | None:
    """The prompt that the stages should read from disk for a request, as they would hold it at
    most; None where that is not worth it, or was done."""
    if queued.disk_asked or queued.request.tenant or not _all_store(state):
        return None
    prompt = prefix_cache.prompt_key(state, queued)
    tokens = min(prompt.shareable, len(prompt.prefix) - 1) // PREFIX_UNIT * PREFIX_UNIT
    least = state.config.min_disk_prefix
    if tokens < least or (prompt.featured and not state.config.stores_features):
        return None
    if tokens - prefix_cache.longest_match(state, prompt).common_prefix < least:
        return None
    ranks = {Rank(rank) for rank in range(1, state.config.stages + 1)}
    return CachedPrompt(
        session=state.next_session,
        prefix=prompt.prefix[: tokens + 1],
        prompt_length=tokens + 1,
        held=tokens,
        tenant=prompt.tenant,
        missing=frozenset(ranks | {DRAFT} if prompt.featured else ranks),
        retained=tokens if prompt.featured else 0,
        stored_slots=tokens,
    )


def in_progress(state: DraftState, prompt: CachedPrompt) -> SessionId | None:
    """What the stages are reading already that is the beginning of a prompt, or most of it."""
    for name, pending in state.restoring.items():
        common = prefix_cache.common_prefix_length(pending.prefix, prompt.prefix)
        if pending.tenant == prompt.tenant and common >= state.config.min_disk_prefix:
            return name
    return None


def begin(state: DraftState, prompt: CachedPrompt, now: float) -> tuple[DraftState, Effects]:
    """Have the stages read a prompt."""
    name = prompt.session
    message = Restore(name, prefix_keys(prompt.prefix[:-1]))
    asks: Effects = tuple(Send(rank, message) for rank in sorted(prompt.missing - {DRAFT}))
    if DRAFT in prompt.missing:
        asks += (ReadPrefix(name, prefix_keys(prompt.prefix[:-1], state.features)),)
    state = replace(
        state,
        next_session=SessionId(name + 1),
        restoring={**state.restoring, name: prompt},
    )
    return state, (*asks, SetTimer(restore_timer(name), now + state.config.rejoin_seconds))


def restore_timer(session: SessionId) -> str:
    """The name of the timer that bounds the wait for the disks."""
    return f"restore:{session}"


def reported(state: DraftState, message: Closed) -> tuple[DraftState, CachedPrompt | None, Effects]:
    """A stage has read what it has of a prompt; also the prompt where nothing of it can be used
    and the stages are to drop it."""
    prompt = state.restoring[message.session]
    return _answered(state, prompt, message.rank, message.restored if message.kept else 0)


def features_read(
    state: DraftState, event: PrefixRead
) -> tuple[DraftState, CachedPrompt | None, Effects]:
    """This node's disk has read features; as ``reported``."""
    prompt = state.restoring.get(event.session)
    if prompt is None:
        return state, None, ()  # it is not wanted any more
    rows = cast("tuple[TensorRows, ...]", event.parts)
    prompt = replace(prompt, features=rows, retained=event.tokens)
    return _answered(state, prompt, DRAFT, event.tokens)


def _answered(
    state: DraftState, prompt: CachedPrompt, rank: Rank, tokens: int
) -> tuple[DraftState, CachedPrompt | None, Effects]:
    name, held = prompt.session, min(prompt.held, tokens)
    prompt = replace(prompt, held=held, missing=prompt.missing - {rank})
    if held and prompt.missing:
        return replace(state, restoring={**state.restoring, name: prompt}), None, ()
    state = without(state, name)
    timer = (SetTimer(restore_timer(name), None),)
    if not held:
        return state, prompt, timer
    prompt = replace(prompt, prefix=prompt.prefix[: held + 1], prompt_length=held + 1)
    if prompt.features is not None:
        prompt = replace(prompt, features=rows_between(prompt.features, 0, held))
    return replace(state, cached_prompts=(*state.cached_prompts, prompt)), None, timer


def store_features(
    state: DraftState, session: DraftSession, *, answered: bool
) -> tuple[DraftState, Effects]:
    """Have this node's disk take the features of a prompt that has been read, or of all that is
    kept of a session with its answer."""
    log = session.features
    if log is None or not state.config.stores_features or state.feature_writes >= MAX_WRITES:
        return state, ()
    # A stored part ends where the next turn's prompt may differ.
    length = row_count(log.kept)
    if not answered:
        length = min(length, kept_state(len(session.prefix), 0))
    end = length // PREFIX_UNIT * PREFIX_UNIT
    if not end or not stored_as(state, session):
        return state, ()
    keys = prefix_keys(session.path(0, end), state.features)
    write = WritePrefix(session.session, keys, 0, end, log.kept)
    return replace(state, feature_writes=state.feature_writes + 1), (write,)


def without(state: DraftState, *names: SessionId) -> DraftState:
    """The state in which nobody waits for these prompts."""
    left = {name: prompt for name, prompt in state.restoring.items() if name not in names}
    return replace(state, restoring=left)


def _all_store(state: DraftState) -> bool:
    """Whether every stage has a disk cache."""
    return len(state.storing_stages) == state.config.stages
