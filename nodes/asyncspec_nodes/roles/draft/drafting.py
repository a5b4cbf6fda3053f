"""Draft requests to the token source, and the trees it drafts.

A source on this node's device gets one batch of all sessions' requests when it is free; a source on
a node of its own makes the batches itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from asyncspec.core import tree as trees
from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.jobs import Feed, Release
from asyncspec.core.machine import Abandon, Compute, Effect, Effects, Emit, Send
from asyncspec.core.tree import TokenTree
from asyncspec.policy.base import Drafted, Growth, max_tree_nodes
from asyncspec.source.base import DraftResults, admitted, batched
from asyncspec_nodes.roles.draft import rates
from asyncspec_nodes.roles.draft.session import DraftRequest, DraftSession, DraftState
from asyncspec_protocol.errors import LocalProtocolError, RemoteProtocolError
from asyncspec_protocol.ids import NodeId, Rank, SessionId
from asyncspec_protocol.limits import MAX_CANDIDATES, MAX_NODES, MAX_TREE_NODES
from asyncspec_protocol.messages import Expand, Expanded, Features, Withdraw


def dispatch_draft_requests(state: DraftState, now: float) -> tuple[DraftState, Effects]:
    """Send draft requests, the longest waiting first, as far as the source takes them."""
    if state.source_busy:
        return state, ()
    source, requests = state.config.source, dict[SessionId, DraftRequest]()

    def wanted() -> Iterator[Expand]:
        for session in sorted(state.sessions.values(), key=lambda session: session.draft_batch):
            if (request := _draft_request(state, session)) is not None:
                requests[session.session] = request
                yield request.job

    jobs = admitted(wanted()) if source is None else tuple(wanted())
    if not jobs:
        return state, ()
    batch = state.draft_batches + 1
    state = replace(state, draft_batches=batch, source_busy=source is None)
    for job in jobs:
        request = requests[job.session]
        session = replace(
            state.sessions[job.session],
            draft_request=replace(request, at=now),
            source_length=request.length,
            last_depth=job.depth,
            draft_batch=batch,
        )
        state = state.with_session(session)
    if source is not None:
        return state, tuple(Send(source, job) for job in jobs)
    return state, (Compute(batched(jobs)),)


def _draft_request(state: DraftState, session: DraftSession) -> DraftRequest | None:
    """The next work of the token source; None while it works or where there is none."""
    if session.draft_request is not None or not session.policy.uses_draft:
        return None
    if state.may_speculate(session) and session.source_limit == session.length:
        growth = session.policy.grow(state.view(session))
        if growth is None or session.no_growth == (growth, session.version, session.next_node):
            return None
    elif session.source_length >= session.source_limit:
        return None
    else:
        growth = None  # the source reads the prompt while the stages do, or right behind them
    length = min(session.source_limit, session.source_length + PARAMETERS.max_draft_tokens)
    if length < session.source_limit:
        growth = None  # it reads first, in chunks between which others' drafts are grown
    job = _expand(session, growth, length)
    request = session.request
    grammar = request.sampling.constraint.grammar
    if (state.config.source_remembers or grammar) and job.base == 0:
        prompt = len(request.prompt)
        job = replace(job, tenant=request.tenant, prompt_length=prompt, grammar=grammar)
    slot = session.clock.source_free()
    return DraftRequest(job, growth, session.version, session.round, slot, length)


def _expand(session: DraftSession, growth: Growth | None, length: int) -> Expand:
    job = Expand(
        session=session.session,
        version=session.version,
        base=session.source_length,
        committed=session.path(session.source_length, length),
        depth=0,
        width=0,
        count=0,
    )
    if growth is None:
        return job
    # A user may name a policy with any parameters: they are cut to what a message can say and other
    # sessions' drafts can wait for.
    shape, max_nodes = growth.shape, MAX_NODES
    start = trees.paths_to(session.tree, growth.frontier)
    parents, tokens, scores = start.part
    expanded = max(1, min(shape.beam or shape.width, max_nodes), len(start.frontier))
    children = max(1, min(max_nodes, MAX_CANDIDATES // expanded))
    widest = min(max(1, shape.width, *shape.widths), children)
    levels = min(MAX_TREE_NODES // expanded, MAX_CANDIDATES // (expanded * widest))
    levels = min(PARAMETERS.max_draft_levels, levels)
    return replace(
        job,
        depth=min(shape.depth, levels),
        width=min(shape.width, children),
        count=min(shape.count, max_nodes),
        beam=min(shape.beam, max_nodes),
        fixed_width=shape.fixed_width,
        widths=tuple([min(width, children) for width in shape.widths[:levels]]),
        parents=parents,
        tokens=tokens,
        scores=scores,
        frontier=start.frontier,
        calibrated=growth.calibrated,
    )


def feed(state: DraftState, session: DraftSession, job: Feed) -> Iterator[Effect]:
    """Give the source, or the user who wants them, features of the target."""
    source, start, request = state.config.source, job.start, session.request
    if source is None and not request.features:
        yield Compute(job)
        return
    for rows in job.rows:
        count = len(rows.rows)
        if request.features:
            name = job.session
            yield Emit(request.request, (), session=name, features=rows, features_start=start)
        elif source is not None:
            yield Send(source, Features(job.session, start, count), rows)
        start += count


def abandon_stale(state: DraftState, session: DraftSession) -> tuple[DraftState, Effects]:
    """Stop a draft request whose tree a miss has killed."""
    request = session.draft_request
    if request is None or request.growth is None or request.abandoned:
        return state, ()
    if request.round == session.round:
        return state, ()
    session = replace(session, draft_request=replace(request, abandoned=True))
    return state.with_session(session), (_stop_source(state, request.job),)


def _stop_source(state: DraftState, job: Expand) -> Effect:
    source = state.config.source
    return Abandon(job) if source is None else Send(source, Withdraw(job.session))


def release_source(state: DraftState, session: DraftSession) -> Effects:
    """A session is over. A source on a node of its own gets the ``Close`` that all nodes get."""
    if state.config.source is not None or not session.policy.uses_draft:
        return ()
    release, request = Compute(Release(session.session)), session.draft_request
    if request is None or request.abandoned:
        return (release,)
    return _stop_source(state, request.job), release


def drafted(state: DraftState, batch: DraftResults, seconds: float, now: float) -> DraftState:
    """The source of this device is free again. A batch's time counts in equal parts."""
    state = rates.count_draft(replace(state, source_busy=False), batch, seconds)
    count = len(batch)
    for _, answer in batch:
        state = _merged(state, answer, seconds / count, count, now)
    return state


def expanded_received(state: DraftState, answer: Expanded, peer: Rank) -> DraftState:
    """Check and merge a draft from a source on a node of its own. Raises ``RemoteProtocolError``
    for one that was not asked for, or with tokens beyond the vocabulary."""
    if (session := state.sessions.get(answer.session)) is not None:
        request = session.draft_request
        if request is None or answer.base != request.length:
            raise RemoteProtocolError(f"session {answer.session} awaits no draft", peer=peer)
        if max(answer.tokens, default=0) >= state.config.vocab:
            raise RemoteProtocolError("a token that is not in the vocabulary", peer=peer)
        state = rates.count_draft(state, ((request.job, answer),), answer.seconds)
    # Requests that are under way together are most likely answered together.
    together = sum([one.draft_request is not None for one in state.sessions.values()])
    return _merged(state, answer, answer.seconds, max(1, together), None)


def _merged(
    state: DraftState, answer: Expanded, seconds: float, together: int, now: float | None
) -> DraftState:
    """``seconds``: its part of a call for so many requests ``together``, of this device where it is
    ``now`` so late."""
    session = state.sessions.get(answer.session)
    if session is None:
        return state  # the session is over
    request = session.draft_request
    if request is not None and request.growth is not None and (seconds or not request.abandoned):
        taken = together * seconds
        depth = 1 if request.abandoned else max(1, request.job.depth)
        rows = together * _mean_rows(request.job)
        # Until the next request there are handling, and waits for a share of a processor.
        call = max(0.0, now - request.at - taken) if now is not None else 0.0
        event = Drafted(taken / depth, state.costs, together, rows, call, request.abandoned)
        state = state.learn(session, event)
    return state.with_session(merge_draft(session, answer, seconds, state.costs.pass_seconds))


def _mean_rows(job: Expand) -> float:
    """Mean rows per level of a draft: the nodes that it expands, or the tokens committed."""
    first, more = len(job.frontier) or max(1, len(job.committed)), max(0, job.depth - 1)
    return (first + more * (job.beam or job.width)) / (1 + more)


def merge_draft(
    session: DraftSession, answer: Expanded, seconds: float, slot_seconds: float
) -> DraftSession:
    """Merge a drafted tree, which took so many ``seconds``, where a pipeline slot takes
    ``slot_seconds`` (0: not known). The tip may have moved on since the request. Raises
    ``LocalProtocolError`` where the session awaits none."""
    request = session.draft_request
    if request is None or answer.base != request.length:
        raise LocalProtocolError(f"session {session.session} awaits no draft")
    session = replace(session, draft_request=None)
    counters = session.counters.plus(draft_passes=1, draft_seconds=seconds)
    if request.growth is None:
        return replace(session, counters=counters)
    clock = session.clock
    if not request.abandoned:
        clock = clock.on_draft(request.slot, seconds / slot_seconds if slot_seconds else 1.0)
    room = max_tree_nodes(session.policy, session.stages) + 1 - len(session.tree)
    tree, new = trees.merge(
        session.tree,
        (answer.parents, answer.tokens, answer.scores),
        session.next_node,
        walked=session.committed[request.length - len(session.prefix) :],
        at_most=min(request.growth.adopt, MAX_NODES, room),
        max_position=session.last_position,
    )
    return replace(
        session,
        tree=tree,
        unsent=session.unsent + new,
        next_node=NodeId(session.next_node + len(new)),
        no_growth=None if new else (request.growth, request.version, session.next_node),
        # A tree requested in an earlier round is merged, but is not this round's own.
        drafts=session.drafts + (request.round == session.round),
        unasked=_unasked(session.unasked, tree, new, request),
        clock=clock,
        counters=counters.plus(drafted=len(new)),
    )


def _unasked(
    unasked: frozenset[NodeId],
    tree: TokenTree,
    new: tuple[NodeId, ...],
    request: DraftRequest,
) -> frozenset[NodeId]:
    """See ``View.unasked``."""
    assert request.growth is not None
    asked, depth = frozenset(request.growth.frontier), request.job.depth
    tip = request.length - 1
    # Where each node's levels of the request begin.
    top: dict[NodeId, int] = {}
    for node, data in tree.nodes.items():
        top[node] = data.position if node in asked else top.get(data.parent, tip)
    deep = {node for node in new if tree.nodes[node].position - top[node] >= depth}
    return frozenset((unasked - asked | deep) & tree.nodes.keys())
