"""How many rows of a session are worth sending, when others share its passes (SpecPipe 4.4).

Alone a session is as wide as its policy says where rows are free, and else as lines and passes
allow (``lines``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import asdict, replace

from asyncspec.core.cost_model import Seconds, best_width
from asyncspec.core.machine import Compute, Effect, Emit, Send
from asyncspec.core.segment import connected
from asyncspec.policy.base import MAX_ROWS
from asyncspec_nodes.roles.draft import admission, lifecycle, prefix_cache, speculation
from asyncspec_nodes.roles.draft.lifecycle import end, give_up, unserved
from asyncspec_nodes.roles.draft.links import Opener, Times, line_seconds, slowest, stage_seconds
from asyncspec_nodes.roles.draft.planning import advanced, tell
from asyncspec_nodes.roles.draft.session import DraftSession, open_session, view
from asyncspec_nodes.roles.draft.state import (
    FIRST,
    DraftState,
    Effects,
    Job,
    guessing,
    put,
    reachable,
    starving,
    without,
)
from asyncspec_protocol.errors import LocalProtocolError
from asyncspec_protocol.ids import NO_PARENT, NodeId, SegmentId, SessionId
from asyncspec_protocol.limits import MAX_NODES
from asyncspec_protocol.messages import Open, Segment


def narrowed(
    session: DraftSession,
    cut: Sequence[NodeId],
    sessions: int,
    seconds: Seconds | None,
    most: int = MAX_ROWS,
) -> DraftSession:
    """The session with the width of its next segment, by the nodes of the one that was just
    ``cut``; ``sessions`` share its passes, and lines allow ``most`` rows. Where even the last of
    them was worth its row, the next one may be twice as wide: what lies beyond is not known."""
    nodes = session.tree.nodes
    chances = sorted((math.exp(nodes[n].score) for n in cut if n in nodes), reverse=True)
    width = MAX_ROWS
    if sessions > 1 and seconds is not None and chances:
        width = best_width(chances, sessions, seconds)
        if width == len(chances):
            width = min(MAX_ROWS, 2 * max(width, min(session.width, MAX_ROWS // 2)))
    return replace(session, width=min(width, most), rows=len(cut))


# --- In how many rows at a time a prompt is read. Pure.
# A prompt goes through the pipeline in pieces: while a stage reads one, the stage before it reads
# the next. Where rows cost little a piece is as long as it may be; where each costs its time, as
# on a CPU, a short prompt in one piece would have one stage at work and all others waiting.

FEWEST = 8
"""Rows of a piece of a prompt: fewer would read the weights too often for it."""

SLOWER = 2.0
"""Times as long as without it: a pass with pieces of prompts in it, at most."""

WORTH = 0.05
"""Of the time until a prompt is read: shorter pieces must save so much. They read weights and
cache more often, and what passes take is measured, and not quite steady."""


def piece_rows(length: int, most: int, times: Times, back: float, decoding: int = 0) -> int:
    """Rows, at most ``most``, of the pieces in which so many tokens of prompts are read soonest; a
    row's features take ``back`` seconds to the draft node, and passes have so many rows of sessions
    with answers besides.

    The first piece goes all the way, and each further one ends a turn later: what the slowest stage
    or line takes for it. Prompts that are read at a time keep stages at work for each other.
    """
    if not times:
        return most
    stages = stage_seconds(times)
    lines = line_seconds(times, back)

    def seconds(rows: int) -> float:
        shared = rows + decoding
        way = [*(stage(shared) for stage in stages), *(line * shared for line in lines)]
        return sum(way) + (math.ceil(length / rows) - 1) * max(way)

    sizes = range(most, min(most, FEWEST) - 1, -1)
    needed = [seconds(min(rows, length)) for rows in sizes]
    bound = min(needed) / (1 - WORTH)
    return next(rows for rows, taken in zip(sizes, needed, strict=True) if taken <= bound)


def shared_rows(most: int, decoding: int, prompts: int, seconds: Seconds | None) -> int:
    """Rows of a piece of a prompt, at most ``most``, beside answers. ``decoding``: rows that
    sessions with answers have in a pass; so many ``prompts`` are read at a time.

    A pass with pieces of prompts in it takes at most ``SLOWER`` times as long as without: users
    whose answers are under way wait no longer, and prompts still get what they leave (Sarathi).
    """
    if not decoding or not prompts or seconds is None:
        return most
    bound, rows = SLOWER * seconds(decoding), most
    while rows > FEWEST and seconds(decoding + prompts * rows) > bound:
        rows = max(FEWEST, rows // 2)
    return rows


# --- What of a session's prompt and tree goes to the first stage next.


def next_segment(
    session: DraftSession, *, guessing: bool, prefill_rows: int, starving: bool
) -> tuple[DraftSession, Segment] | None:
    """The next piece of the prompt, or what the policy wants to send; ``guessing``: its tree may be
    sent."""
    if session.prefilled < len(session.prefix):
        return _prefill(session, min(session.piece, prefill_rows))
    if not guessing:
        return None
    # Parents come first: what a segment has no room for waits for the next one.
    ids = session.policy.cut(view(session, starving=starving))[:MAX_NODES]
    if not ids:
        return None
    chosen = frozenset(ids)
    if not connected(session.tree, ids, session.sent) or session.sent & chosen:
        raise LocalProtocolError(f"policy cut nodes that cannot be sent: {ids}")
    nodes = session.tree.nodes
    message = _segment(
        session,
        ids,
        tuple(session.root_parent if n == session.tree.root else nodes[n].parent for n in ids),
        tuple(nodes[n].token for n in ids),
    )
    counters = session.counters
    if not session.segments and session.answering:
        counters = replace(counters, rounds=counters.rounds + 1)
    session = replace(
        session,
        unsent=tuple([n for n in session.unsent if n not in chosen]),
        sent=session.sent | chosen,
        segments=session.segments + 1,
        next_segment=SegmentId(session.next_segment + 1),
        clock=session.clock.send(message.segment, drafts=ids != (session.tree.root,)),
        counters=counters,
    )
    return session, message


def _prefill(session: DraftSession, rows: int) -> tuple[DraftSession, Segment]:
    start, root = session.prefilled, session.tree.root
    end = min(start + rows, len(session.prefix))
    ids = tuple(NodeId(i) for i in range(start, end))
    parents = tuple(NodeId(i - 1) if i else NO_PARENT for i in ids)
    message = _segment(session, ids, parents, session.prefix[start:end])
    unsent, clock = session.unsent, session.clock
    if root in ids:
        # No live node is older than the root.
        unsent, clock = unsent[1:], clock.send(message.segment, drafts=False)
    return (
        replace(
            session,
            prefilled=end,
            unsent=unsent,
            sent=session.sent.union({root}.intersection(ids)),
            next_segment=SegmentId(session.next_segment + 1),
            clock=clock,
        ),
        message,
    )


def _segment(
    session: DraftSession,
    ids: tuple[NodeId, ...],
    parents: tuple[NodeId, ...],
    tokens: tuple[int, ...],
) -> Segment:
    return Segment(
        session=session.session,
        segment=session.next_segment,
        applied=session.version,
        ids=ids,
        parents=parents,
        tokens=tokens,
    )


def together(segments: Sequence[Segment]) -> Sequence[Segment]:
    """Segments that go out at once, each with the number of those behind it that can share its
    pass: it has one of a session at most."""
    found: list[Segment] = []
    after: set[SessionId] = set()
    for segment in reversed(segments):
        if segment.session in after:
            after.clear()
        found.append(replace(segment, batch_remaining=len(after)) if after else segment)
        after.add(segment.session)
    return found[::-1]


# --- Who sends next: the first stage's credit is handed out to the sessions.


def send(state: DraftState, now: float) -> tuple[DraftState, Effects]:
    """Hand out credit, one segment a session in turn, the longest waiting first. What can be sent
    only now that there is credit again had to wait for it."""
    if state.sent >= state.allowed:
        return (state if state.dry else replace(state, dry=True)), ()
    segments: list[Segment] = []
    # The prompt of who is alone is in nobody's way.
    idle, seconds = 0, slowest(state.times) if len(state.sessions) > 1 else None
    decoding = [session for session in state.sessions.values() if session.answering]
    busy = sum([session.rows for session in decoding])
    state = _pieced(state, busy)
    prompts = len(state.sessions) - len(decoding)
    rows = shared_rows(state.config.prefill_rows, busy, prompts, seconds)
    while state.sent < state.allowed and idle < len(state.sessions):
        session = next(iter(state.sessions.values()))
        cut = next_segment(
            session,
            guessing=guessing(state, session),
            prefill_rows=rows,
            starving=starving(state),
        )
        if cut is None:
            idle += 1
        else:
            idle = 0
            session, message = cut
            if session.segments == 1 and session.answering:
                opener = Opener(message.segment, now, len(message.ids))
                session = replace(session, opener=opener)
            most = state.lines.rows
            if len(decoding) <= 1 and session.policy.narrows:
                most = min(most, state.lines.alone)
            session = narrowed(session, message.ids, len(decoding), seconds, most)
            if session.policy.planned:
                session = replace(session, sent_at=now)
            state = replace(state, sent=state.sent + 1)
            segments.append(replace(message, waited=True) if state.dry else message)
        state = put(without(state, session.session), session)
    dry = state.sent >= state.allowed
    state = state if dry == state.dry else replace(state, dry=dry)
    return state, tuple(Send(FIRST, segment) for segment in together(segments))


def _pieced(state: DraftState, busy: int) -> DraftState:
    """Sessions whose prompts are new, once and for all with the rows of their pieces; ``busy``:
    rows of sessions that are further on."""
    new = [one for one in state.sessions.values() if not (one.piece or one.answering)]
    if not new:
        return state
    left = sum(len(one.prefix) - one.prefilled for one in state.sessions.values())
    most = state.config.prefill_rows
    piece = piece_rows(left, most, state.times, state.lines.back, busy)
    for one in new:
        state = put(state, replace(one, piece=piece))
    return state


# --- After every input every session goes as far as it can.


def go_on(state: DraftState, now: float) -> tuple[DraftState, Effects]:
    """Open what can be opened, accept what can be accepted, ask and send what can be.

    Nothing is opened, asked or sent between two verdicts of one pass: sessions that shared a pass
    go on together, so that they share the next one too.
    """
    effects: list[Effect] = []
    for session in state.sessions.values():
        state, accepted = _advance(state, session, now)
        effects.extend(accepted)
    if spare := prefix_cache.spare(state):
        state, given_up = give_up(state, spare)
        effects.extend(given_up)
    if not state.expected:
        state, opened = _open_all(state, now)
        effects.extend(opened)
        state, told = tell(state)
        effects.extend(told)
        state, sent = send(state, now)
        effects.extend(sent)
    for session in state.sessions.values():
        if fed := speculation.feed(session):
            session = fed[0]
            state = put(state, session)
            effects.append(Compute(fed[1]))
        if stopped := speculation.stop_asking(session):
            state = put(state, stopped[0])
            effects.append(speculation.stop(state, stopped[1]))
    if not state.expected:
        state, asked = speculation.dispatch_request(state)
        effects.extend(asked)
    return state, tuple(effects)


def _open_all(state: DraftState, now: float) -> tuple[DraftState, Effects]:
    """Sessions for the requests that wait, in their order, as far as there is room. Only who waits
    for a prompt that another session is reading anyway lets others pass."""
    effects: Effects = ()
    most = state.config.max_sessions
    while state.up and len(state.sessions) < most and not lifecycle.on_trial(state):
        state, job = _next(state)
        if job is None:
            break
        left = tuple(other for other in state.backlog if other is not job)
        if why := admission.too_large(state, job.request):
            state = replace(state, backlog=left)
            effects = (*effects, unserved(job, "error", why, now))
        elif admission.fits(state, job.request):
            state, opened = _open(replace(state, backlog=left), job, now)
            effects += opened
        elif free := admission.prompts_in_the_way(state, job.request):
            # A request that waits is worth more than one that may come.
            state, given_up = give_up(state, free[:1])
            effects += given_up
        else:
            break
    return state, effects


def _next(state: DraftState) -> tuple[DraftState, Job | None]:
    """The first request that waits for no other one's prompt. Prompts are long: what one waits for
    is noted, not found out at every input anew."""
    for place, job in enumerate(state.backlog):
        if prefix_cache.waits(state, job):
            continue
        behind = prefix_cache.being_read(state, prefix_cache.wanted(state, job))
        if behind is None:
            return state, job
        backlog = list(state.backlog)
        backlog[place] = replace(job, behind=behind)
        state = replace(state, backlog=tuple(backlog))
    return state, None


def _open(state: DraftState, job: Job, now: float) -> tuple[DraftState, Effects]:
    config, request, sampling = state.config, job.request, job.request.sampling
    policy = config.policies[request.policy]
    features = config.features if policy.drafts else ()
    start = prefix_cache.best_start(state, prefix_cache.wanted(state, job))
    session = open_session(
        state.next_session,
        request,
        policy,
        config.stages,
        job.given,
        job.counters.opened_at(now),
        featured=bool(features),
        like=start.like,
        shared=start.shared,
        features=start.features,
    )
    message = Open(
        session=session.session,
        prompt_length=len(session.prefix),
        capacity=len(request.prompt) + request.max_new_tokens,
        max_tree_nodes=session.most_live,
        resumed_tokens=len(job.given),
        features=features,
        top_logprobs=session.tops,
        log_probs=request.log_probs,
        parent_session=start.like,
        common_prefix=start.shared,
        coalesce=policy.coalesce,
        **asdict(sampling),
    )
    state = replace(state, next_session=SessionId(state.next_session + 1))
    return put(state, session), (Send(FIRST, message),)


def _advance(state: DraftState, session: DraftSession, now: float) -> tuple[DraftState, Effects]:
    moved = speculation.advance(session, now)
    if moved is None:
        return state, ()
    request = session.request.request
    emit = Emit(request, moved.tokens, moved.hits, session.session, moved.outputs)
    effects: Effects = (emit,)
    if moved.finish is not None:
        state, ended = end(state, moved.session, moved.finish, now)
        return state, (*effects, *ended)
    assert moved.prune is not None
    prunes = tuple(Send(rank, moved.prune) for rank in reachable(state))
    state = advanced(state, session, moved)
    return put(state, moved.session), (*effects, *prunes)
