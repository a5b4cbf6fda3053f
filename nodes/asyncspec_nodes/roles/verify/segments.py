"""Segments at a stage: checked and queued as they arrive, pruned at once, and what passes make of
them, which goes to the next stage or becomes a verdict.

A segment arrives here (``receive_segment``), is started by ``batching``, and ends in
``pass_done``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from asyncspec.core.jobs import Batch, Forward, SamplerOutput, TensorRows
from asyncspec.core.machine import Compute, Computed, Effect, Effects, Received, Send
from asyncspec_nodes.roles.verify.flow_control import (
    extend_credit,
    grant,
    release_dead,
    report_costs,
    with_link_cost,
)
from asyncspec_nodes.roles.verify.lifecycle import close_session, report
from asyncspec_nodes.roles.verify.planning import segment_arrived
from asyncspec_nodes.roles.verify.session import (
    Pass,
    PassPart,
    QueuedSegment,
    StageSession,
    VerifyState,
    applied,
    check_was_opened,
    drop_dead_rows,
    fault,
    is_prefill,
    prune,
    survivors,
)
from asyncspec_protocol.errors import LocalProtocolError, RemoteProtocolError
from asyncspec_protocol.ids import NodeId, Rank, SegmentId, SessionId, is_draft, owner
from asyncspec_protocol.messages import Close, PruneIndices, Segment, Verdict


def receive_segment(
    state: VerifyState, event: Received, message: Segment, now: float
) -> tuple[VerifyState, Effects]:
    """Check and queue a segment. Raises ``RemoteProtocolError`` for one that must not come."""
    peer, ids = event.peer, message.ids
    state = _count_segment(with_link_cost(state, message, event.seconds), peer, message)
    session, first = state.sessions.get(message.session), is_draft(peer)
    needs_tokens = session.tokens_travel if session is not None else bool(message.tokens)
    if (event.tensor is None) != first or bool(message.tokens) != (first or needs_tokens):
        raise RemoteProtocolError("segment without its rows' input", peer=peer)
    if not ids:
        raise RemoteProtocolError("segment without rows", peer=peer)
    if max((*message.tokens, *message.scored_tokens), default=0) >= state.config.vocab:
        raise RemoteProtocolError("segment with a token that is not in the vocabulary", peer=peer)
    if session is None:
        check_was_opened(state, message.session, peer)
        return grant(state, (peer,))
    if message.aux_states != session.aux_states(state.config.first_layer):
        raise RemoteProtocolError(
            f"segment with {message.aux_states} auxiliary states a row", peer=peer
        )
    if len(message.scored_tokens) != session.scored_rows(ids):
        text = f"segment with {len(message.scored_tokens)} tokens to score"
        raise RemoteProtocolError(text, peer=peer)
    if len(ids) > session.max_rows:
        text = f"a segment of {len(ids)} rows: those of session {message.session} may have "
        raise RemoteProtocolError(f"{text}{session.max_rows}", peer=peer)
    segment = QueuedSegment(
        session=message.session,
        segment=message.segment,
        applied=message.applied,
        ids=ids,
        parents=message.parents,
        tokens=message.tokens,
        hidden=None if first else TensorRows(event.tensor, tuple(range(len(ids)))),
        since=now,
        earlier_seconds=0.0 if first else message.stage_seconds,  # a draft node is no stage
        pass_number=message.pass_number,
        scored_tokens=message.scored_tokens,
    )
    live = drop_dead_rows(session, segment)
    if live is None:
        return grant(state, (peer,))
    waiting_segments = [waiting for waiting in state.queue if waiting.session == message.session]
    if error := orphan_error(session, waiting_segments, (live,)):
        # Every link delivers a parent before its children. A stage that passed the node on had the
        # parent: the draft node has sent the stages different prunes.
        rejected = fault(peer, message.session, error)
        state, closed = close_session(state, Close(message.session))
        state, granted = grant(state, (peer,))
        return state, (*closed, *granted, rejected)
    if first and (error := size_error(session, (*waiting_segments, live))):
        # Checked here alone: no prune overtakes what was sent to the first stage after it.
        raise RemoteProtocolError(error, peer=peer)
    if first and not waiting_segments:
        session = replace(session, returns=session.returns.returned(now))
        state = replace(state, sessions={**state.sessions, message.session: session})
    state = extend_credit(segment_arrived(state, message.session, now), peer, message)
    return grant(replace(state, queue=(*state.queue, live)), (peer,))


def _count_segment(state: VerifyState, peer: Rank, message: Segment) -> VerifyState:
    credit = state.inbound.get(peer)
    if credit is None or credit.received >= credit.granted:
        raise RemoteProtocolError("segment without credit", peer=peer)
    received = credit.received + 1
    if message.batch_remaining > credit.granted - received:
        raise RemoteProtocolError("more segments announced than there is credit for", peer=peer)
    expected = message.batch_remaining
    return state.with_credit(peer, replace(credit, received=received, expected=expected))


def receive_prune(state: VerifyState, message: PruneIndices) -> tuple[VerifyState, Effects]:
    """Apply a prune. Raises ``RemoteProtocolError`` where it leaves a queued orphan node."""
    name = message.session
    session = state.sessions.get(name)
    if session is None:
        check_was_opened(state, name, owner(name))
        return state, ()
    pruned, compact = prune(session, message)
    if pruned is session:
        return state, ()  # an old one
    state, effects = release_dead(replace(state, sessions={**state.sessions, name: pruned}))
    left = [segment for segment in state.queue if segment.session == name]
    if left and (error := orphan_error(pruned, (), left)):
        raise RemoteProtocolError(error, peer=owner(name))
    return state, effects if compact is None else (Compute(compact), *effects)


def size_error(session: StageSession, queue: Sequence[QueuedSegment]) -> str:
    """Why a session with this queue is larger than it was opened for; empty where it is not. A node
    of a tree costs as much memory and time as it has ancestors in it."""
    name, cached, liveness = session.opening.session, session.slots, session.liveness
    queued, prompt = sum([len(waiting.ids) for waiting in queue]), liveness.prompt_length
    slots = cached.used + queued
    if slots > session.max_slots:
        return f"session {name} has {slots} live nodes, and was opened for {session.max_slots}"
    # Nothing of a tree comes before all of the prompt.
    tree = len(cached.speculative) + queued - max(0, prompt - cached.committed)
    max_tree_nodes, accepted = session.max_tree_nodes, liveness.accepted
    if tree > max_tree_nodes and accepted:
        # New roots are committed before they come.
        ids = [node for waiting in queue for node in waiting.ids]
        tree -= sum([node in accepted and node >= prompt for node in ids])
    if tree > max_tree_nodes:
        return f"session {name} has a tree of {tree} nodes, and was opened for {max_tree_nodes}"
    return ""


def orphan_error(
    session: StageSession, queue: Iterable[QueuedSegment], segments: Iterable[QueuedSegment]
) -> str:
    """The error of the first node of ``segments`` that has no parent here, is here already, or is a
    sibling of a committed node, which would lose its parent when the tip moves; empty where there
    is none. ``queue``: the session's queue."""
    held, here = session.slots.speculative, {session.slots.tip}
    accepted, last = session.liveness.accepted, session.liveness.prompt_length - 1
    # Parents of committed nodes that wait, with the only child they may have.
    committed: dict[NodeId, NodeId] = {}

    def note_committed(segment: QueuedSegment) -> None:
        if accepted and not accepted.isdisjoint(segment.ids):
            pairs = zip(segment.parents, segment.ids, strict=True)
            committed.update((parent, node) for parent, node in pairs if node in accepted)

    for segment in queue:
        here.update(segment.ids)
        note_committed(segment)
    for segment in segments:
        note_committed(segment)
        unseen = held.keys().isdisjoint(segment.ids)
        for node, parent in zip(segment.ids, segment.parents, strict=True):
            attached = node not in here and (parent in here or parent in held)
            # The prompt is one path, and everything else is below its end.
            on_path = parent == node - 1 if node <= last else parent >= last
            if not (unseen and attached and on_path) or committed.get(parent, node) != node:
                name = session.opening.session
                return f"node {node} of session {name} does not follow its parent {parent}"
            here.add(node)
    return ""


def pass_done(
    state: VerifyState, computed: Computed, job: Forward | Batch, now: float
) -> tuple[VerifyState, Effects]:
    """A pass has ended. Raises ``LocalProtocolError`` where it was not running."""
    running = state.running
    if running is None or (running.job is not job and _names(running.job) != _names(job)):
        raise LocalProtocolError(f"no such {type(job).__name__} is running: {_names(job)}")
    rows, abandoned = running.job.row_count, running.abandoned
    sessions, closing = dict(state.sessions), dict(state.closing)
    outbox: list[QueuedSegment] = []
    verdicts: list[Send] = []
    seen: set[SessionId] = set()
    queued = {segment.session for segment in state.queue}
    for part, own_result in zip(running.parts, _results(running, computed.result), strict=True):
        segment, name, own_rows = part.segment, part.segment.session, len(part.segment.ids)
        mapping = closing if name in closing else sessions
        session = mapping.get(name)
        if session is None:
            continue  # dropped with a lost peer
        alive, first = survivors(session, part.segment.ids), name not in seen
        session = replace(
            session,
            passes=session.passes + first,
            finished_passes=session.finished_passes + (first and not abandoned),
            rows=session.rows + own_rows,
            dead_rows=session.dead_rows + own_rows - len(alive),
            compute_seconds=session.compute_seconds + computed.seconds * own_rows / rows,
        )
        if state.config.rank == 1 and name not in queued and not is_prefill(segment, session):
            more = own_rows if first else session.returns.rows + own_rows
            session = replace(session, returns=session.returns.ended(now, more))
        mapping[name] = session
        seen.add(name)
        if mapping is closing or abandoned:
            continue  # an abandoned pass has no rows, also where a prune revives dead nodes
        if not state.config.last:
            if alive:
                tokens = segment.tokens if session.tokens_travel else ()
                hidden = TensorRows(own_result, tuple(range(own_rows)))
                onward = replace(segment, tokens=tokens, hidden=hidden, passed_over=0)
                outbox.append(onward.select(alive))
        elif verdict := _verdict(session, part, own_result, alive, now):
            verdicts.append(verdict)
    over = sorted(seen & closing.keys())
    effects: list[Effect] = [
        report(closing.pop(name), kept=name in state.cached_prompts) for name in over
    ]
    outbox = [*state.outbox, *outbox]
    state = replace(state, running=None, sessions=sessions, closing=closing, outbox=tuple(outbox))
    if not abandoned:
        cost = state.cost.observe(rows, computed.seconds, computed.waited)
        state, reports = report_costs(replace(state, cost=cost))
        effects.extend(reports)
    return state, (*_with_batch_remaining(verdicts), *effects)


def _results(running: Pass, result: object) -> Sequence[object]:
    """The result of each part."""
    if isinstance(running.job, Forward):
        return (result,)
    if not isinstance(result, tuple) or len(result) != len(running.parts):
        raise LocalProtocolError("the device has computed other passes than those of its job")
    return result


def _names(job: Forward | Batch) -> tuple[tuple[SessionId, SegmentId], ...]:
    passes = job.passes if isinstance(job, Batch) else (job,)
    return tuple([(one.session, one.segment) for one in passes])


def _with_batch_remaining(verdicts: Sequence[Send]) -> Sequence[Send]:
    """Verdicts of one pass, each with the number of those behind it on its link."""
    numbered: list[Send] = []
    behind: Counter[Rank] = Counter()
    for send in reversed(verdicts):
        remaining = behind[send.to]
        message = replace(send.message, batch_remaining=remaining) if remaining else send.message
        numbered.append(replace(send, message=message))
        behind[send.to] += 1
    return numbered[::-1]


def _verdict(
    session: StageSession, part: PassPart, result: object, alive: Sequence[int], now: float
) -> Send | None:
    """The verdict on the rows that are alive, with features where the session has some."""
    segment, sampled, opening = part.segment, part.job.sampled_rows, session.opening
    output = result if isinstance(result, SamplerOutput) else SamplerOutput(result)  # type: ignore[arg-type]
    tokens, top_tokens, log_probs = output.tokens, output.top_tokens, output.token_log_probs
    if not isinstance(tokens, tuple) or len(tokens) != len(sampled):
        raise LocalProtocolError("the device has sampled other rows than those of its job")
    if (
        (output.features is not None) != bool(opening.features)
        or len(top_tokens) != (len(tokens) if opening.top_logprobs else 0)
        or len(log_probs) != (len(tokens) if opening.log_probs else 0)
        or (output.prompt_logprobs is not None) != bool(part.job.scored_tokens)
    ):
        raise LocalProtocolError(
            "the device's features or log-probabilities do not fit the session"
        )
    ids, live = segment.ids, set(alive)
    verified = [i for i, row in enumerate(sampled) if row in live]
    features = None
    if output.features is not None and alive:
        features = TensorRows(output.features, tuple(alive))
    if not verified and features is None and output.prompt_logprobs is None:
        return None
    likeliest = [top_tokens[i] for i in verified] if top_tokens else []
    message = Verdict(
        session=opening.session,
        segment=segment.segment,
        applied=applied(session, segment),
        ids=tuple([ids[sampled[i]] for i in verified]),
        tokens=tuple([tokens[i] for i in verified]),
        feature_ids=() if features is None else tuple([ids[row] for row in alive]),
        top_tokens=tuple([token for some, _ in likeliest for token in some]),
        top_token_log_probs=tuple([log_prob for _, some in likeliest for log_prob in some]),
        token_log_probs=tuple([log_probs[i] for i in verified]) if log_probs else (),
        stage_seconds=segment.stage_seconds(now),
        pass_number=segment.pass_number,
        prompt_logprobs=output.prompt_logprobs,
    )
    return Send(owner(opening.session), message, features)
