"""The prefix cache: a common prefix of prompts is read once.

The stages hold the prompts of open sessions, and of some that are over with their answers, as the
next turn of a chat continues an answer. A session whose prompt begins with one of them takes those
cache slots over and sends nothing of it; the target's features of them are held here and fed to the
token source again. Every stage has a prompt in its first slots. It has an answer behind it once
it has applied the prune that commits the last of it, as its statistics say: an ``Open`` may reach
it earlier.

Only requests of one tenant share (``Request.tenant``): the time to the first token and the count
of shared tokens would tell one tenant what another one's prompt begins with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.feature_log import rows_between
from asyncspec.core.jobs import TensorRows
from asyncspec_nodes.roles.draft.session import (
    CachedPrompt,
    DraftSession,
    DraftState,
    QueuedRequest,
)
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import Closed


class PromptKey(Struct, frozen=True):
    """A prompt that is to be read, and what decides whether a prefix of it can be taken over."""

    prefix: tuple[int, ...]
    tenant: str
    # Its token source reads features of the target.
    featured: bool
    # Its first tokens that the last stage need not read, as its draws do not depend on them.
    shareable: int


class PrefixMatch(Struct, frozen=True):
    """What a new session takes over: so many tokens of an older one, and their features."""

    parent_session: SessionId = SessionId(-1)
    common_prefix: int = 0
    features: tuple[TensorRows, ...] = ()
    # As in ``CachedPrompt``, for these.
    retained: int = 0


def prompt_key(state: DraftState, queued: QueuedRequest) -> PromptKey:
    """What a queued request has to read."""
    request, config = queued.request, state.config
    featured = bool(state.features and config.policies[request.policy].uses_draft)
    prefix = request.prompt + queued.given
    shareable = request.sampling.shareable(len(request.prompt), len(prefix))
    if queued.prompt_logprobs >= 0 or request.features:
        shareable = 0  # what is scored, or shown, is computed
    return PromptKey(prefix, request.tenant, featured, shareable)


def longest_match(state: DraftState, prompt: PromptKey) -> PrefixMatch:
    """The longest prefix of a prompt that the stages hold."""
    best = PrefixMatch()
    read = (as_cached(candidate) for candidate in state.sessions.values() if candidate.decoding)
    for candidate in (*_used(state.cached_prompts), *read):
        length = _match_length(state, candidate, prompt)
        if length > best.common_prefix:
            best = PrefixMatch(candidate.session, length)
            if prompt.featured and candidate.features:
                rows = rows_between(candidate.features, 0, length)
                retained = candidate.retained - (row_count(candidate.features) - length)
                best = replace(best, features=rows, retained=retained)
    return best


def awaits_prefix(state: DraftState, queued: QueuedRequest) -> bool:
    """Whether a session, or the stages' disks, are still reading what a request waits for."""
    name = queued.pending_prefix
    if name in state.restoring:
        return True
    session = None if name is None else state.sessions.get(name)
    return session is not None and not session.decoding


def prefix_in_progress(state: DraftState, prompt: PromptKey) -> SessionId | None:
    """The session that is reading more of a prompt than is held, as with several answers to one
    prompt; None where there is none, or waiting for it would take longer than reading."""
    reading = [session for session in state.sessions.values() if not session.decoding]
    lengths = {one.session: _match_length(state, as_cached(one), prompt) for one in reading}
    if not any(lengths.values()):
        return None
    held = longest_match(state, prompt).common_prefix
    worth = [
        one.session
        for one in reading
        if len(one.prefix) - one.prefilled < PARAMETERS.prefix_wait * (lengths[one.session] - held)
    ]
    return max(worth, key=lengths.__getitem__, default=None)


def _match_length(state: DraftState, cached: CachedPrompt, prompt: PromptKey) -> int:
    """Tokens of a prompt to take over from a cached one; 0 where it is not worth it. The last token
    of the prompt is not shared: it is to be verified."""
    if cached.tenant != prompt.tenant:
        return 0
    least = state.config.min_common_prefix
    # Most prompts differ in their first tokens, and are long.
    if (prompt.featured and cached.features is None) or cached.prefix[:least] != prompt.prefix[
        :least
    ]:
        return 0
    length = common_prefix_length(cached.prefix[: cached.held], prompt.prefix[:-1])
    length = min(length, prompt.shareable)
    if prompt.featured:
        length = min(length, row_count(cached.features))
    if state.config.keeps_states:
        tip = 0 if cached.is_cut else len(cached.prefix) - 1
        length = max(at for at in (0, cached.kept_state, tip) if at <= length)
    return length if length >= least else 0


def as_cached(session: DraftSession) -> CachedPrompt:
    """What can be taken over of a session whose prompt has been read. Its last token's feature
    came with its verdict."""
    log, length = session.features, len(session.prefix)
    if session.request.features:
        log = None  # its user's, and not what a token source reads
    return CachedPrompt(
        session.session,
        session.prefix,
        length,
        length - 1,
        session.request.tenant,
        features=None if log is None else log.kept,
        retained=0 if log is None else log.retained,
        kept_state=session.kept_state,
        # A session that runs is at another tip already.
        is_cut=True,
    )


def cache_prompt(state: DraftState, session: DraftSession) -> tuple[DraftState, bool]:
    """Whether the prompt of a session that is over stays cached, with its answer but for the last
    token, which no stage has computed. One that begins like another one's prompt and goes on is of
    more use: a chat is there once. Of too many the oldest are dropped."""
    max_cached = state.config.max_cached_prompts
    candidate = replace(
        as_cached(session),
        prefix=session.prefix + session.committed,
        missing=frozenset(state.linked_stages),
        is_cut=session.is_cut,
    )
    long = len(candidate.prefix) - 1 >= state.config.min_common_prefix
    length = len(candidate.prefix)
    covered = any(_covers(other, candidate, length) for other in _used(state.cached_prompts))
    if not (max_cached and session.decoding and long) or covered:
        if candidate.session not in _needed(state):
            return state, False
        cached = (*state.cached_prompts, replace(candidate, unused=True))
        return replace(state, cached_prompts=cached), True
    others = [
        replace(other, unused=other.unused or _covers(candidate, other, other.prompt_length))
        for other in state.cached_prompts
    ]
    used = {o.session for o in [*_used(others), candidate][-max_cached:]}
    cached = tuple(replace(o, unused=o.session not in used) for o in (*others, candidate))
    return replace(state, cached_prompts=cached), True


def reported(state: DraftState, message: Closed) -> DraftState:
    """A stage has closed a session: what was to stay of it is there, or is not."""
    name, cached = message.session, state.cached_prompts
    if all(prompt.session != name for prompt in cached):
        return state
    prompts = (
        _reported(prompt, message) if prompt.session == name else prompt for prompt in cached
    )
    return replace(state, cached_prompts=tuple(prompts))


def _reported(cached: CachedPrompt, message: Closed) -> CachedPrompt:
    if not message.kept:
        return replace(cached, held=0, unused=True)
    missing = cached.missing - {message.rank}
    held = cached.held if missing or not cached.held else len(cached.prefix) - 1
    return replace(cached, held=held, missing=missing)


def _used(prompts: Iterable[CachedPrompt]) -> list[CachedPrompt]:
    return [one for one in prompts if not one.unused]


def _needed(state: DraftState) -> frozenset[SessionId]:
    """Sessions whose prompts must stay: the ``Open`` of a session that begins with one of them may
    not have reached every stage, and a ``Close`` would overtake it."""
    finishing = (one.session for one in state.finishing.values())
    sessions = (*state.sessions.values(), *finishing)
    return frozenset(session.parent_session for session in sessions if not session.decoding)


def evictable(state: DraftState) -> tuple[CachedPrompt, ...]:
    """Prompts that could be dropped now, the oldest first."""
    needed = _needed(state) if state.cached_prompts else frozenset()
    return tuple(one for one in state.cached_prompts if one.session not in needed)


def unused(state: DraftState) -> tuple[CachedPrompt, ...]:
    """Prompts to drop now, because nothing begins with them any more."""
    if not any(one.unused for one in state.cached_prompts):
        return ()
    return tuple(one for one in evictable(state) if one.unused)


def _covers(long: CachedPrompt, short: CachedPrompt, length: int) -> bool:
    """Whether whatever could begin with the first ``length`` tokens of ``short`` could as well
    begin with ``long``."""
    fed = long.features is not None or short.features is None
    return long.tenant == short.tenant and fed and long.prefix[:length] == short.prefix[:length]


def common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix, by bisection: slices are compared in C."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def row_count(features: Sequence[TensorRows] | None) -> int:
    """Positions whose features are held."""
    return sum(len(some.rows) for some in features or ())
