"""Prompts that begin alike are read once (prefix caching).

The stages hold the prompts of sessions that are open, and of some that are over. A session whose
prompt begins like one of them takes those cache slots over, and nothing of it is sent; what the
target said of them for the token source, its features, is held here and given to the source once
more. Only prompts are shared: every stage has them in its first slots, whatever became of the
answer.

Only requests of one tenant share (``Request.tenant``): the time to the first token and the count
of shared tokens would tell one tenant what another one's prompt begins with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.jobs import TensorRows
from asyncspec_nodes.roles.draft.session import DraftSession
from asyncspec_nodes.roles.draft.state import DraftState, Job, Kept
from asyncspec_protocol.ids import SessionId


class Wanted(Struct, frozen=True):
    """A prompt that is to be read, and how."""

    prefix: tuple[int, ...]
    # Its token source reads features of the target.
    featured: bool
    # Penalties count tokens of the prompt on the last stage, which therefore has to read them all.
    penalises: bool
    tenant: str


def wanted(state: DraftState, job: Job) -> Wanted:
    """What a request that waits would have to read."""
    policy = state.config.policies[job.request.policy]
    return Wanted(
        job.request.prompt + job.given,
        bool(state.config.features and policy.uses_draft),
        job.request.sampling.penalises,
        job.request.tenant,
    )


class Start(Struct, frozen=True):
    """What a new session takes over: so many tokens of an older one, and their features."""

    like: SessionId = SessionId(-1)
    shared: int = 0
    features: tuple[TensorRows, ...] = ()


def best_start(state: DraftState, prompt: Wanted) -> Start:
    """The longest beginning of a prompt that the stages hold."""
    best = Start()
    for one in _held(state):
        shared = _shared(state, one, prompt)
        if shared > best.shared:
            rows = _first(one.features, shared) if prompt.featured and one.features else ()
            best = Start(one.session, shared, rows)
    return best


def waits(state: DraftState, job: Job) -> bool:
    """Whether a session is still reading the prompt that a request waits for."""
    session = None if job.behind is None else state.sessions.get(job.behind)
    return session is not None and not session.answering


def being_read(state: DraftState, prompt: Wanted) -> SessionId | None:
    """The session by which more of a prompt is held soon, for it is reading that just now; None
    where there is none, or where it would be waited for longer than reading takes. Several answers
    to one prompt come so."""
    reading = [session for session in state.sessions.values() if not session.answering]
    shared = {one.session: _shared(state, as_kept(one), prompt) for one in reading}
    if not any(shared.values()):
        return None
    held = best_start(state, prompt).shared
    worth = [
        one.session
        for one in reading
        if len(one.prefix) - one.prefilled < PARAMETERS.prefix_wait * (shared[one.session] - held)
    ]
    return max(worth, key=shared.__getitem__, default=None)


def _shared(state: DraftState, one: Kept, prompt: Wanted) -> int:
    """Tokens of a prompt that can be taken over from one that is held; 0 where it is not worth it.

    The last token of either is not shared: the one is to be verified, and the other's feature came
    with its verdict, not with the prompt.
    """
    if one.tenant != prompt.tenant:
        return 0
    if prompt.penalises or (prompt.featured and one.features is None):
        return 0
    least = state.config.share_from
    if one.prefix[:least] != prompt.prefix[:least]:
        return 0  # most do not begin alike, and are long
    shared = alike(one.prefix[:-1], prompt.prefix[:-1])
    return shared if shared >= least else 0


def _held(state: DraftState) -> Iterator[Kept]:
    yield from _useful(state.kept)
    for session in state.sessions.values():
        if session.answering:
            yield as_kept(session)


def as_kept(session: DraftSession) -> Kept:
    """What can be taken over of a session whose prompt has been read."""
    features = None if session.features is None else session.features.prompt
    return Kept(session.session, session.prefix, session.request.tenant, features)


def keep(state: DraftState, session: DraftSession) -> tuple[DraftState, bool]:
    """A session is over: whether its prompt is kept, and for whom. What begins another one that is
    kept is of no use to those to come, and what there is too much of, the oldest first."""
    one, most = as_kept(session), state.config.kept
    long = len(one.prefix) - 1 >= state.config.share_from
    covered = any(_covers(other, one) for other in _useful(state.kept))
    if not (most and session.answering and long) or covered:
        if one.session not in _needed(state):
            return state, False
        return replace(state, kept=(*state.kept, replace(one, spare=True))), True
    others = [replace(o, spare=o.spare or _covers(one, o)) for o in state.kept]
    useful = {o.session for o in [*_useful(others), one][-most:]}
    kept = tuple(replace(o, spare=o.session not in useful) for o in (*others, one))
    return replace(state, kept=kept), True


def _useful(kept: Iterable[Kept]) -> list[Kept]:
    return [one for one in kept if not one.spare]


def _needed(state: DraftState) -> frozenset[SessionId]:
    """Whose prompts must stay, because the ``Open`` of a session that begins like them may not have
    reached every stage: a ``Close`` would overtake it."""
    ending = (ending.session for ending in state.endings.values())
    sessions = (*state.sessions.values(), *ending)
    return frozenset(session.like for session in sessions if not session.answering)


def not_needed(state: DraftState) -> tuple[Kept, ...]:
    """Prompts that could be given up now, the oldest first."""
    needed = _needed(state) if state.kept else frozenset()
    return tuple(one for one in state.kept if one.session not in needed)


def spare(state: DraftState) -> tuple[Kept, ...]:
    """Those that nobody needs any more."""
    if not any(one.spare for one in state.kept):
        return ()
    return tuple(one for one in not_needed(state) if one.spare)


def _covers(one: Kept, other: Kept) -> bool:
    """Whether whatever could begin like ``other`` could as well begin like ``one``."""
    fed = one.features is not None or other.features is None
    return one.tenant == other.tenant and fed and one.prefix[: len(other.prefix)] == other.prefix


def alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _first(features: Sequence[TensorRows], count: int) -> tuple[TensorRows, ...]:
    """The features of the first ``count`` positions."""
    found: list[TensorRows] = []
    for some in features:
        if count <= 0:
            break
        found.append(TensorRows(some.handle, some.rows[:count]))
        count -= len(some.rows)
    return tuple(found)
