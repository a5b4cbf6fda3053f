"""How many rows of a session are worth sending, when others share its passes (SpecPipe 4.4).

Alone a session is as wide as its policy says where rows are free, and else as lines and passes
allow (``lines``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import asdict, replace

from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.cost_model.passes import PassSeconds
from asyncspec.core.cost_model.pipeline import RoundTripProbe
from asyncspec.core.cost_model.rows import best_tree_budget, chunk_rows_beside
from asyncspec.core.machine import Compute, Effect, Emit, Send
from asyncspec.core.tree import connected
from asyncspec_nodes.roles.draft import admission, lifecycle, prefix_cache, speculation
from asyncspec_nodes.roles.draft.lifecycle import end, give_up, unserved
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


def with_tree_budget(
    session: DraftSession,
    cut: Sequence[NodeId],
    sessions: int,
    seconds: PassSeconds | None,
    max_rows: int = PARAMETERS.max_rows,
) -> DraftSession:
    """The session with the tree budget of its next segment, from the acceptance chances of the
    nodes that were just ``cut``. ``sessions`` share its passes, and links allow ``max_rows``. Where
    even the last node was worth its row the budget doubles: what lies beyond is not known."""
    nodes = session.tree.nodes
    chances = sorted((math.exp(nodes[n].score) for n in cut if n in nodes), reverse=True)
    budget = limit = PARAMETERS.max_rows
    if sessions > 1 and seconds is not None and chances:
        budget = best_tree_budget(chances, sessions, seconds)
        if budget == len(chances):
            budget = min(limit, 2 * max(budget, min(session.tree_budget, limit // 2)))
    return replace(session, tree_budget=min(budget, max_rows), rows=len(cut))


# --- What of a session's prompt and tree goes to the first stage next.


def next_segment(
    session: DraftSession, *, guessing: bool, prefill_rows: int, starving: bool
) -> tuple[DraftSession, Segment] | None:
    """The next piece of the prompt, or what the policy wants to send; ``guessing``: its tree may be
    sent."""
    if session.prefilled < len(session.prefix):
        return _prefill(session, min(session.chunk_rows, prefill_rows))
    if not guessing:
        return None
    # Parents come first: what a segment has no room for waits for the next one.
    ids = session.policy.next_segment(view(session, starving=starving))[:MAX_NODES]
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
    idle, seconds = 0, state.costs.slowest if len(state.sessions) > 1 else None
    decoding = [session for session in state.sessions.values() if session.answering]
    busy = sum([session.rows for session in decoding])
    state = _with_chunk_rows(state, busy)
    prompts = len(state.sessions) - len(decoding)
    rows = chunk_rows_beside(state.config.prefill_rows, busy, prompts, seconds)
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
                probe = RoundTripProbe(message.segment, now, len(message.ids))
                session = replace(session, probe=probe)
            most = state.costs.max_rows
            if len(decoding) <= 1 and session.policy.limits_rows:
                most = min(most, state.costs.max_lone_rows)
            session = with_tree_budget(session, message.ids, len(decoding), seconds, most)
            if session.policy.plannable:
                session = replace(session, sent_at=now)
            state = replace(state, sent=state.sent + 1)
            segments.append(replace(message, waited=True) if state.dry else message)
        state = put(without(state, session.session), session)
    dry = state.sent >= state.allowed
    state = state if dry == state.dry else replace(state, dry=dry)
    return state, tuple(Send(FIRST, segment) for segment in together(segments))


def _with_chunk_rows(state: DraftState, busy: int) -> DraftState:
    """Set the chunk rows of sessions whose prompts are new, once and for all; ``busy``: rows of
    sessions that are further on."""
    new = [one for one in state.sessions.values() if not (one.chunk_rows or one.answering)]
    if not new:
        return state
    left = sum(len(one.prefix) - one.prefilled for one in state.sessions.values())
    rows = state.costs.prefill_chunk_rows(left, state.config.prefill_rows, busy)
    for one in new:
        state = put(state, replace(one, chunk_rows=rows))
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
    features = config.features if policy.uses_draft else ()
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
        max_tree_nodes=session.max_tree_nodes,
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
