"""The scheduler: after every input each session goes as far as it can.

One scheduler pass accepts what verdicts allow, opens sessions, hands out the first stage's credit,
and sends draft requests to the token source.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.cost_model.passes import PassSeconds
from asyncspec.core.cost_model.pipeline import RoundTripProbe
from asyncspec.core.cost_model.rows import best_tree_budget, chunk_rows_beside
from asyncspec.core.machine import Effect, Effects, Emit, Send
from asyncspec.core.tree import connected
from asyncspec.policy.base import Committed
from asyncspec_nodes.roles.draft import disk_cache, drafting, prefix_cache, rates, verdicts
from asyncspec_nodes.roles.draft.admission import open_sessions
from asyncspec_nodes.roles.draft.lifecycle import drop_prompts, finish_request
from asyncspec_nodes.roles.draft.session import FIRST, DraftSession, DraftState
from asyncspec_protocol.errors import LocalProtocolError
from asyncspec_protocol.ids import NO_PARENT, NodeId, SegmentId, SessionId
from asyncspec_protocol.limits import MAX_NODES
from asyncspec_protocol.messages import Segment


def schedule(state: DraftState, now: float) -> tuple[DraftState, Effects]:
    """Accept, open, send and request what is possible now. Between two verdicts of one pass only
    accept, so that the sessions of the pass share the next one too."""
    effects: list[Effect] = []
    for session in state.sessions.values():
        state, accepted = _accept(state, session, now)
        effects.extend(accepted)
    if prompts := prefix_cache.unused(state):
        state, dropped = drop_prompts(state, prompts)
        effects.extend(dropped)
    if not state.expected_verdicts:
        state, opened = open_sessions(state, now)
        effects.extend(opened)
        state, reports = rates.report_rates(state)
        effects.extend(reports)
        state, sent = send_segments(state, now)
        effects.extend(sent)
    for session in state.sessions.values():
        if session.features is not None and (fed := session.features.feed(session.session)):
            session = replace(session, features=fed[0])
            state = state.with_session(session)
            effects.extend(drafting.feed(state, session, fed[1]))
        state, stopped = drafting.abandon_stale(state, session)
        effects.extend(stopped)
    if not state.expected_verdicts:
        state, requests = drafting.dispatch_draft_requests(state, now)
        effects.extend(requests)
    return state, tuple(effects)


def _accept(state: DraftState, session: DraftSession, now: float) -> tuple[DraftState, Effects]:
    accepted = verdicts.accept(state, session, now)
    if accepted is None:
        return state, ()
    request, moved = session.request.request, accepted.session
    # What waited for another session's prompt says nothing of the speed without one.
    timed = session.decoding and not state.prompts_beside(session.session, session.committed_at)
    committed = Committed(
        session.tree,
        accepted.tokens,
        state.costs,
        now - session.committed_at if timed else 0.0,
        speculated=len(session.sent) > 1,
        sessions=sum([other.decoding for other in state.sessions.values()]),
    )
    if accepted.tokens:
        state = state.learn(session, committed)
    emit = Emit(
        request,
        accepted.tokens,
        accepted.hits,
        session.session,
        accepted.outputs,
        session.prompt_logprobs,
        min(session.counters.shared, len(session.request.prompt)),
    )
    if accepted.finish:
        features: Effects = ()
        if moved.features is not None and moved.request.features:
            fed = moved.features.feed(moved.session)
            features = () if fed is None else tuple(drafting.feed(state, moved, fed[1]))
        state, ended = finish_request(state, moved, accepted.finish, now, accepted.prune)
        return state, (emit, *features, *ended)
    assert accepted.prune is not None
    prunes = tuple(Send(rank, accepted.prune) for rank in state.linked_stages)
    state = rates.count_round(state, session, accepted.hits)
    state = state.with_session(moved)
    if session.decoding:
        return state, (emit, *prunes)
    state, stored = disk_cache.store_features(state, moved, answered=False)
    return state, (emit, *prunes, *stored)


def send_segments(state: DraftState, now: float) -> tuple[DraftState, Effects]:
    """Hand out credit, a segment a session in turn; after a lack of it segments ``waited``."""
    if state.sent >= state.allowed:
        return (state if state.out_of_credit else replace(state, out_of_credit=True)), ()
    segments: list[Segment] = []
    progress: list[Effect] = []
    # A lone session's prompt delays no other.
    idle = 0
    seconds = state.costs.slowest if len(state.sessions) > 1 else None
    decoding = [session for session in state.sessions.values() if session.decoding]
    busy = sum([session.rows for session in decoding])
    state = _with_chunk_rows(state, busy)
    prompts = len(state.sessions) - len(decoding)
    max_rows = max(state.config.prefill_rows, state.costs.max_chunk_rows)
    chunk = chunk_rows_beside(max_rows, busy, prompts, seconds)
    while state.sent < state.allowed and idle < len(state.sessions):
        session = next(iter(state.sessions.values()))
        cut = next_segment(state, session, chunk)
        if cut is None:
            idle += 1
        else:
            idle = 0
            if session.request.progress and 0 < session.prefilled < len(session.prefix):
                progress.append(_progress(session))
            session, message = cut
            max_rows = state.costs.max_rows
            if len(decoding) <= 1 and session.policy.limits_rows:
                max_rows = min(max_rows, state.costs.max_lone_rows)
            session = _with_probe(session, message, now)
            if session.policy.plannable:
                session = replace(session, sent_at=now)
            session = _with_tree_budget(session, message.ids, len(decoding), seconds, max_rows)
            state = replace(state, sent=state.sent + 1)
            segments.append(replace(message, waited=True) if state.out_of_credit else message)
        state = state.without_session(session.session).with_session(session)
    state = replace(state, out_of_credit=state.sent >= state.allowed)
    sent = tuple(Send(FIRST, segment) for segment in with_batch_remaining(segments))
    return state, (*sent, *progress)


def _progress(session: DraftSession) -> Emit:
    """Tokens of the prompt that stages have, once they take a further chunk."""
    request = session.request
    return Emit(
        request.request,
        (),
        session=session.session,
        shared_tokens=min(session.counters.shared, len(request.prompt)),
        prompt_read=session.prefilled,
    )


def _with_probe(session: DraftSession, message: Segment, now: float) -> DraftSession:
    """Measure the round trip of a prompt's last segment, of the first one of a round, and else of
    one segment at a time."""
    segment, rows, probe = message.segment, len(message.ids), session.probe
    if session.segments == 1 and session.decoding:
        probe = RoundTripProbe(segment, now, rows, uncongested=True)
    elif probe is None or message.ids[-1] < len(session.prefix):
        probe = RoundTripProbe(segment, now, rows)
    return replace(session, probe=probe)


def _with_chunk_rows(state: DraftState, busy: int) -> DraftState:
    """Set the chunk rows of new prompts once and for all; ``busy``: rows of other sessions."""
    new = [
        session
        for session in state.sessions.values()
        if not (session.chunk_rows or session.decoding)
    ]
    if not new:
        return state
    left = sum(len(session.prefix) - session.prefilled for session in state.sessions.values())
    rows = state.costs.prefill_chunk_rows(left, state.config.prefill_rows, busy)
    for session in new:
        state = state.with_session(replace(session, chunk_rows=rows))
    return state


def _with_tree_budget(
    session: DraftSession,
    cut: Sequence[NodeId],
    sessions: int,
    seconds: PassSeconds | None,
    max_rows: int,
) -> DraftSession:
    """The session with the tree budget of its next segment, from the acceptance chances of the
    nodes just ``cut`` (SpecPipe 4.4). ``sessions`` share its passes, links allow ``max_rows``.
    Where even the last node was worth its row the budget doubles."""
    budget = limit = PARAMETERS.max_rows
    if sessions > 1 and seconds is not None and not session.policy.plans_rows:
        nodes = session.tree.nodes
        chances = sorted((math.exp(nodes[n].score) for n in cut if n in nodes), reverse=True)
        if chances:
            budget = best_tree_budget(chances, sessions, seconds)
        if budget == len(chances):
            budget = min(limit, 2 * max(budget, min(session.tree_budget, limit // 2)))
    return replace(session, tree_budget=min(budget, max_rows), rows=len(cut))


def with_batch_remaining(segments: Sequence[Segment]) -> Sequence[Segment]:
    """Segments with the number of those behind that share a pass: one a session at most."""
    numbered: list[Segment] = []
    after: set[SessionId] = set()
    for segment in reversed(segments):
        if segment.session in after:
            after.clear()
        numbered.append(replace(segment, batch_remaining=len(after)) if after else segment)
        after.add(segment.session)
    return numbered[::-1]


def next_segment(
    state: DraftState, session: DraftSession, prefill_rows: int
) -> tuple[DraftSession, Segment] | None:
    """The next chunk of the prompt, or what the policy wants to send, if anything. Raises
    ``LocalProtocolError`` where the policy names nodes that cannot be sent."""
    if session.prefilled < len(session.prefix):
        return _prefill(session, min(session.chunk_rows, prefill_rows))
    if not state.may_speculate(session):
        return None
    # Parents come first: what a segment has no room for waits for the next one.
    ids = session.policy.next_segment(state.view(session))[:MAX_NODES]
    if not ids:
        return None
    chosen = frozenset(ids)
    if not connected(session.tree, ids, session.sent) or session.sent.keys() & chosen:
        raise LocalProtocolError(f"policy cut nodes that cannot be sent: {ids}")
    nodes, root = session.tree.nodes, session.tree.root
    parents = tuple(session.root_parent if n == root else nodes[n].parent for n in ids)
    tokens = tuple(nodes[n].token for n in ids)
    name, number = session.session, session.next_segment
    message = Segment(name, number, session.version, ids, parents, tokens)
    session = replace(
        session,
        unsent=tuple([n for n in session.unsent if n not in chosen]),
        sent={**session.sent, **dict.fromkeys(ids, number)},
        segments=session.segments + 1,
        next_segment=SegmentId(number + 1),
        clock=session.clock.on_sent(message.segment, drafted=ids != (root,)),
        counters=session.counters.plus(rounds=not session.segments and session.decoding),
    )
    return session, message


def _prefill(session: DraftSession, rows: int) -> tuple[DraftSession, Segment]:
    start, root = session.prefilled, session.tree.root
    end = min(start + rows, len(session.prefix))
    ids = tuple(NodeId(i) for i in range(start, end))
    parents = tuple(NodeId(i - 1) if i else NO_PARENT for i in ids)
    name, number = session.session, session.next_segment
    tokens = session.prefix[start:end]
    scored = session.prefix[start + 1 : end + 1] if session.scores_prompt else ()
    version = session.version
    message = Segment(name, number, version, ids, parents, tokens, scored_tokens=scored)
    session = replace(session, prefilled=end, next_segment=SegmentId(number + 1))
    if root in ids:
        session = replace(
            session,
            unsent=session.unsent[1:],  # no live node is older than the root
            sent={**session.sent, root: number},
            clock=session.clock.on_sent(message.segment, drafted=False),
        )
    return session, message
