"""Draft requests to the token source, drafted trees, verdicts, and acceptance.

A source on this node's device gets one batch of all sessions' requests when it is free; a source on
a node of its own makes the batches itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core import tree as trees
from asyncspec.core.accept import TargetOutput, walk
from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.jobs import Feed, Release
from asyncspec.core.machine import Abandon, Compute, Effect, Effects, Received, Send
from asyncspec.policy.base import Drafted, Growth, max_tree_nodes
from asyncspec.source.base import DraftResults, admitted, batched
from asyncspec_nodes.roles.draft import planning
from asyncspec_nodes.roles.draft.session import DraftRequest, DraftSession, DraftState
from asyncspec_protocol.errors import LocalProtocolError, RemoteProtocolError
from asyncspec_protocol.ids import NodeId, Rank, SessionId, Version
from asyncspec_protocol.limits import MAX_CANDIDATES, MAX_NODES
from asyncspec_protocol.messages import (
    Expand,
    Expanded,
    Features,
    PruneIndices,
    Verdict,
    Withdraw,
)


def dispatch_draft_requests(state: DraftState) -> tuple[DraftState, Effects]:
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
            draft_request=request,
            source_length=request.length,
            last_depth=request.growth.shape.depth if request.growth else 0,
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
    if state.config.source_remembers and job.base == 0:
        request = session.request
        job = replace(job, tenant=request.tenant, prompt_length=len(request.prompt))
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
    # A user may name a policy with any parameters: they are cut to what a message can say.
    shape, most = growth.shape, MAX_NODES
    start = trees.paths_to(session.tree, growth.frontier)
    parents, tokens, scores = start.known
    expanded = max(1, min(shape.beam or shape.width, most), len(start.frontier))
    children = max(1, min(most, MAX_CANDIDATES // expanded))
    widest = min(max(1, shape.width, *shape.widths), children)
    levels = min(most, MAX_CANDIDATES // (expanded * widest))
    return replace(
        job,
        depth=min(shape.depth, levels),
        width=min(shape.width, children),
        count=min(shape.count, most),
        beam=min(shape.beam, most),
        fixed_width=shape.fixed_width,
        widths=tuple([min(width, children) for width in shape.widths[:levels]]),
        parents=parents,
        tokens=tokens,
        scores=scores,
        frontier=start.frontier,
    )


def feed_source(state: DraftState, job: Feed) -> Iterator[Effect]:
    """Give the source features of the target."""
    source, start = state.config.source, job.start
    if source is None:
        yield Compute(job)
        return
    for rows in job.rows:
        count = len(rows.rows)
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


def drafted(state: DraftState, batch: DraftResults, seconds: float) -> DraftState:
    """The source of this device is free again. A batch's time counts in equal parts."""
    state = planning.count_draft(replace(state, source_busy=False), batch, seconds)
    for _, answer in batch:
        state = _merged(state, answer, seconds / len(batch))
    return state


def expanded_received(state: DraftState, answer: Expanded, peer: Rank) -> DraftState:
    """Check and merge a draft from a source on a node of its own."""
    if (session := state.sessions.get(answer.session)) is not None:
        request = session.draft_request
        if request is None or answer.base != request.length:
            raise RemoteProtocolError(f"session {answer.session} awaits no draft", peer=peer)
        if max(answer.tokens, default=0) >= state.config.vocab:
            raise RemoteProtocolError("a token that is not in the vocabulary", peer=peer)
        state = planning.count_draft(state, ((request.job, answer),), answer.seconds)
    return _merged(state, answer, answer.seconds)


def _merged(state: DraftState, answer: Expanded, seconds: float) -> DraftState:
    session = state.sessions.get(answer.session)
    if session is None:
        return state  # the session is over
    request = session.draft_request
    if request is not None and request.growth is not None and not request.abandoned:
        level = seconds / max(1, request.job.depth)
        state = state.learn(session, Drafted(level, state.costs))
    return state.with_session(merge_draft(session, answer, seconds, state.costs.pass_seconds))


def merge_draft(
    session: DraftSession, answer: Expanded, seconds: float, slot_seconds: float
) -> DraftSession:
    """Merge a drafted tree, which took so many ``seconds``, where a pipeline slot takes
    ``slot_seconds`` (0: not known). The tip may have moved on since the request."""
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
        clock=clock,
        counters=counters.plus(drafted=len(new)),
    )


def verdict_received(
    state: DraftState, event: Received, message: Verdict, now: float
) -> DraftState:
    """Note a verdict's outputs, and what it says of costs."""
    costs, session = state.costs, state.sessions.get(message.session)
    if message.feature_ids:
        costs = costs.with_feature_rows(event.seconds / len(message.feature_ids))
    if session is None and message.session >= state.next_session:
        raise RemoteProtocolError(f"session {message.session} was never opened", peer=event.peer)
    if session is not None:
        probe = session.probe
        if probe is not None and probe.segment <= message.segment:
            session = replace(session, probe=None)
            if probe.segment == message.segment:
                costs = costs.with_round_trip(probe.rows, now - probe.sent_at)
        if max((*message.tokens, *message.top_tokens), default=0) >= state.config.vocab:
            raise RemoteProtocolError("a token that is not in the vocabulary", peer=event.peer)
        state = planning.count_links(state, message, now)
        state = state.with_session(record_verdict(session, message, event.tensor))
    return replace(state, expected_verdicts=message.batch_remaining, costs=costs)


def record_verdict(session: DraftSession, verdict: Verdict, handle: object | None) -> DraftSession:
    """Note the target's outputs; ``handle``: to the features that came with them. Raises
    ``RemoteProtocolError`` for nodes never sent, and for features not requested."""
    named = {*verdict.ids, *verdict.feature_ids}
    unsent = (n for n in named if n >= session.next_node or n in session.tree)
    prompt = range(session.prefilled, len(session.prefix))
    if any(n in prompt for n in named) or any(n not in session.sent for n in unsent):
        raise RemoteProtocolError(f"verdict on a node never sent in session {verdict.session}")
    if verdict.applied > session.version:
        # What is taken for known to every stage is never announced again.
        raise RemoteProtocolError(
            f"version {verdict.applied} of session {session.session} was never announced"
        )
    features = session.features
    if features is not None:
        features = features.receive(verdict, handle, session.sent)
    elif verdict.feature_ids or handle is not None:
        raise RemoteProtocolError(f"features for session {session.session}, which reads none")
    alive = {n: o for n, o in _target_outputs(session, verdict) if n in session.sent}
    return replace(
        session,
        verified={**session.verified, **alive},
        features=features,
        acknowledged=max(session.acknowledged, verdict.applied),
        clock=session.clock.on_verdict(verdict.segment, session.stages, verdict.pass_number),
        counters=session.counters.plus(passes=session.decoding),
    )


def _target_outputs(
    session: DraftSession, verdict: Verdict
) -> Iterator[tuple[NodeId, TargetOutput]]:
    """What a verdict says of each node, in the detail that the policy needs."""
    tops = len(verdict.top_tokens) // max(1, len(verdict.ids))
    if bool(tops) != bool(session.top_logprobs and verdict.ids):
        raise RemoteProtocolError(f"{tops} likeliest tokens a node in session {session.session}")
    if bool(verdict.token_log_probs) != bool(session.request.log_probs and verdict.ids):
        raise RemoteProtocolError(f"log-probabilities or none in session {session.session}")
    for i, (node, token) in enumerate(zip(verdict.ids, verdict.tokens, strict=True)):
        part = slice(i * tops, (i + 1) * tops)
        log_prob = verdict.token_log_probs[i] if verdict.token_log_probs else None
        top = (verdict.top_tokens[part], verdict.top_token_log_probs[part])
        yield node, TargetOutput(token, *top, log_prob)


class Accepted(Struct, frozen=True):
    """The committed path has grown by ``tokens``, of which the first ``hits`` were nodes of the
    tree. Either a prune follows, or the answer ends for the reason ``finish``."""

    session: DraftSession
    tokens: tuple[int, ...]
    hits: int
    # The target's output at each token, where requested.
    outputs: tuple[TargetOutput, ...]
    finish: str
    prune: PruneIndices | None = None


def accept(state: DraftState, session: DraftSession, now: float) -> Accepted | None:
    """Accept what verdicts allow. None where they bring nothing new, or the policy waits."""
    if session.decoding and not session.policy.accepts_verdicts(state.view(session)):
        return None
    walked = walk(session.tree, session.verified, session.policy.choose)
    if not walked.accepted and walked.bonus is None:
        return None
    tokens = tuple(session.tree.nodes[n].token for n in walked.accepted)
    tokens = tokens if walked.bonus is None else (*tokens, walked.bonus)
    tokens, finish = _until_end(session, tokens)
    hits = min(len(tokens), len(walked.accepted))
    outputs: tuple[TargetOutput, ...] = ()
    if session.request.log_probs:
        path = (session.tree.root, *walked.accepted)
        outputs = tuple(session.verified[node] for node in path[: len(tokens)])
    session = _count(session, len(tokens), hits, now)
    moved = replace(session, committed=session.committed + tokens, committed_at=now)
    if finish:
        return Accepted(moved, tokens, hits, outputs, finish)
    moved = _move_tip(moved, walked.accepted, walked.bonus)
    return Accepted(moved, tokens, hits, outputs, finish, _prune(moved))


def _until_end(session: DraftSession, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
    """Cut at the first stop token or at the token limit, and the reason to finish, if any."""
    left = session.request.max_new_tokens - session.new_tokens
    for i, token in enumerate(tokens[:left]):
        if token in session.request.stop_tokens:
            return tokens[: i + 1], "stop"
    return tokens[:left], "length" if len(tokens) >= left else ""


def _count(session: DraftSession, tokens: int, hits: int, now: float) -> DraftSession:
    """Count ``tokens`` new tokens, of which the first ``hits`` were nodes of the tree."""
    counters, clock, place = session.counters, session.clock, session.new_tokens
    if not session.decoding:
        clock = replace(clock, first_token=clock.now)
        # A round that was begun before counts where it goes on.
        counters = counters.plus(rounds=hits > 0 and session.segments > 0, firsts=(place,))
        if counters.first_token is None:
            counters = replace(counters, first_token=now)
        place, tokens, hits = place + 1, tokens - 1, max(0, hits - 1)
    missed = tuple(range(place + hits, place + tokens))
    return replace(session, counters=counters.plus(misses=missed), clock=clock)


def _move_tip(
    session: DraftSession, accepted: tuple[NodeId, ...], bonus: int | None
) -> DraftSession:
    """The tip moves along ``accepted``, and on a miss to a new root with the token ``bonus``."""
    version = Version(session.version + 1)
    tip = accepted[-1] if accepted else session.tree.root
    if bonus is None:
        parent = session.tree.nodes[tip].parent
        tree, news = trees.reroot(session.tree, tip), accepted
        fresh = session
    else:
        parent, root = tip, session.next_node
        position = session.tree.nodes[tip].position + 1
        tree, news = trees.new_tree(root, bonus, position), (*accepted, root)
        fresh = replace(
            session,
            next_node=NodeId(root + 1),
            round=session.round + 1,
            clock=session.clock.on_miss(),
            segments=0,
            drafts=0,
            last_depth=0,
        )
    features = session.features
    if features is not None:
        path = (session.tree.root, *accepted)
        features = features.advance(path if bonus is not None else path[:-1], tree.nodes)
    # What every stage has applied need not be announced again: the nodes announced so far have
    # all passed every stage, for their verdicts led here, and are in its cache as committed.
    known = tuple((n, v) for n, v in session.announced if v > session.acknowledged)
    return replace(
        fresh,
        tree=tree,
        initial_depth=tree.bottom - tree.nodes[tree.root].position,
        root_parent=parent,
        version=version,
        unsent=tuple([n for n in session.unsent if n in tree]) if bonus is None else (tree.root,),
        sent=session.sent.intersection(tree.nodes),
        verified={n: t for n, t in session.verified.items() if n in tree},
        features=features,
        announced=(*known, *((n, version) for n in news)),
    )


def _prune(session: DraftSession) -> PruneIndices:
    root = session.tree.root
    return PruneIndices(
        session=session.session,
        version=session.version,
        horizon=session.next_node,
        accepted=tuple(n for n, _ in session.announced),
        keep=tuple([n for n in session.tree.nodes if n != root]),
    )
