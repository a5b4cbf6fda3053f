"""Verdicts of the last stage, the tokens they accept, and the prune that follows."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core import tree as trees
from asyncspec.core.accept import TargetOutput, Walk, walk
from asyncspec.core.cost_model.pipeline import PipelineCosts, RoundTripProbe
from asyncspec.core.machine import Received
from asyncspec.core.tensors import UnreadTensor
from asyncspec_nodes.roles.draft import rates
from asyncspec_nodes.roles.draft.session import DraftSession, DraftState
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.ids import NodeId, Version
from asyncspec_protocol.messages import PruneIndices, Verdict


def verdict_received(
    state: DraftState, event: Received, message: Verdict, now: float
) -> DraftState:
    """Note a verdict's outputs, and what it says of costs. Raises ``RemoteProtocolError`` for a
    session that was never opened, and for tokens beyond the vocabulary."""
    costs, session = state.costs, state.sessions.get(message.session)
    if message.feature_ids and not (session and session.request.features):
        costs = costs.with_feature_rows(event.seconds / len(message.feature_ids))
    if session is None and message.session >= state.next_session:
        raise RemoteProtocolError(f"session {message.session} was never opened", peer=event.peer)
    if session is not None:
        probe = session.probe
        if probe is not None and probe.segment <= message.segment:
            if probe.segment == message.segment:
                costs = _with_probe_result(state, session, probe, message, now)
            session = replace(session, probe=None)
        likeliest = message.prompt_logprobs.top_tokens if message.prompt_logprobs else ()
        named = (*message.tokens, *message.top_tokens, *likeliest)
        if max(named, default=0) >= state.config.vocab:
            raise RemoteProtocolError("a token that is not in the vocabulary", peer=event.peer)
        state = rates.count_links(state, message, now)
        state = state.with_session(record_verdict(session, message, event.tensor))
    return replace(state, expected_verdicts=message.batch_remaining, costs=costs)


def _with_probe_result(
    state: DraftState, session: DraftSession, probe: RoundTripProbe, message: Verdict, now: float
) -> PipelineCosts:
    """The costs after a probe's verdict."""
    costs, seconds = state.costs, now - probe.sent_at
    prompts = state.prompts_beside(message.session, probe.sent_at)
    if session.decoding or not prompts:
        # Else it waited for other prompts' rows, on links whose speed is not known by then.
        costs = costs.with_overhead(probe.rows, seconds - message.stage_seconds)
    if probe.uncongested and not prompts:
        costs = costs.with_round_trip(probe.rows, seconds)
    return costs


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
        if isinstance(handle, UnreadTensor) and not session.request.features:
            raise RemoteProtocolError(handle.why)
        features = features.receive(verdict, handle, session.sent)
    elif verdict.feature_ids or handle is not None:
        raise RemoteProtocolError(f"features for session {session.session}, which reads none")
    session = _with_prompt_logprobs(session, verdict)
    alive = {n: o for n, o in _target_outputs(session, verdict) if n in session.sent}
    return replace(
        session,
        verified={**session.verified, **alive},
        features=features,
        acknowledged=max(session.acknowledged, verdict.applied),
        clock=session.clock.on_verdict(verdict.segment, session.stages, verdict.pass_number),
        counters=session.counters.plus(passes=session.decoding),
    )


def _with_prompt_logprobs(session: DraftSession, verdict: Verdict) -> DraftSession:
    """Append a chunk's log-probabilities. Chunks are verified in order, and all are there with the
    output for the prompt's last token."""
    if (part := verdict.prompt_logprobs) is not None:
        top = max(0, session.request.prompt_logprobs)
        if len(part.top_tokens) > top * len(part.log_probs) or bool(top) != bool(part.top_tokens):
            raise RemoteProtocolError(f"likeliest prompt tokens in session {session.session}")
        session = replace(session, prompt_logprobs=(*session.prompt_logprobs, part))
    scorable = len(session.prefix) - 1 if session.scores_prompt and not session.decoding else 0
    if session.scored > scorable or (verdict.ids and session.scored < scorable):
        raise RemoteProtocolError(
            f"{session.scored} of {scorable} prompt logprobs in session {session.session}"
        )
    return session


def _target_outputs(
    session: DraftSession, verdict: Verdict
) -> Iterator[tuple[NodeId, TargetOutput]]:
    """What a verdict says of each node, in the detail that the policy needs."""
    likeliest = len(verdict.top_tokens) // max(1, len(verdict.ids))
    if bool(likeliest) != bool(session.top_logprobs and verdict.ids):
        raise RemoteProtocolError(
            f"{likeliest} likeliest tokens a node in session {session.session}"
        )
    if bool(verdict.token_log_probs) != bool(session.request.log_probs and verdict.ids):
        raise RemoteProtocolError(f"log-probabilities or none in session {session.session}")
    for i, (node, token) in enumerate(zip(verdict.ids, verdict.tokens, strict=True)):
        part = slice(i * likeliest, (i + 1) * likeliest)
        log_prob = verdict.token_log_probs[i] if verdict.token_log_probs else None
        top = (verdict.top_tokens[part], verdict.top_token_log_probs[part])
        yield node, TargetOutput(token, *top, log_prob)


class Accepted(Struct, frozen=True):
    """The committed path has grown by ``tokens``, of which the first ``hits`` were nodes of the
    tree. A prune follows, unless the answer ends, for the reason ``finish``, without another node
    of the tree."""

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
    moved = replace(
        session,
        committed=session.committed + tokens,
        committed_at=now,
        prompt_logprobs=(),
    )
    if finish:
        prune = _last_prune(moved, walked.accepted[:hits]) if hits else None
        moved = _with_last_features(moved, walked)
        return Accepted(moved, tokens, hits, outputs, finish, prune)
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
    if not tokens:
        return session  # the prompt alone was requested
    if not session.decoding:
        clock = replace(clock, first_token=clock.now)
        # A round that was begun before counts where it continues.
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
    return replace(
        fresh,
        tree=tree,
        initial_depth=tree.bottom - tree.nodes[tree.root].position,
        root_parent=parent,
        version=version,
        unsent=tuple([n for n in session.unsent if n in tree]) if bonus is None else (tree.root,),
        sent={n: segment for n, segment in session.sent.items() if n in tree},
        verified={n: t for n, t in session.verified.items() if n in tree},
        features=features,
        announced=(*_unacknowledged(session), *((n, version) for n in news)),
    )


def _with_last_features(session: DraftSession, walked: Walk) -> DraftSession:
    """An answer that has ended keeps the features of its last nodes for prompts that go on."""
    if (features := session.features) is None:
        return session
    path = (session.tree.root, *walked.accepted)
    passed = path if walked.bonus is not None else path[:-1]
    return replace(session, features=features.advance(passed, ()))


def _unacknowledged(session: DraftSession) -> tuple[tuple[NodeId, Version], ...]:
    """What some stage may not have applied. What all have need not be announced again: the nodes
    announced so far have all passed every stage, for their verdicts led here, and are in its cache
    as committed."""
    return tuple((n, v) for n, v in session.announced if v > session.acknowledged)


def _last_prune(session: DraftSession, accepted: tuple[NodeId, ...]) -> PruneIndices:
    """The prune of an answer that has ended with some nodes: nothing below them is alive."""
    return PruneIndices(
        session=session.session,
        version=Version(session.version + 1),
        horizon=session.next_node,
        accepted=(*(n for n, _ in _unacknowledged(session)), *accepted),
        keep=(),
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
