"""Passes end: what is left of a segment goes to the next stage, or becomes a verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from asyncspec.core.jobs import Batch, Forward, SamplerOutput, TensorRows
from asyncspec.core.machine import Effect, Effects, Send
from asyncspec_nodes.roles.verify.flow_control import report_costs
from asyncspec_nodes.roles.verify.lifecycle import report
from asyncspec_nodes.roles.verify.session import (
    Pass,
    PassPart,
    QueuedSegment,
    StageSession,
    VerifyState,
    applied,
    survivors,
)
from asyncspec_protocol.errors import LocalProtocolError
from asyncspec_protocol.ids import Rank, SegmentId, SessionId, owner
from asyncspec_protocol.messages import Verdict


def pass_done(
    state: VerifyState, job: Forward | Batch, result: object, seconds: float, now: float
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
    for part, own_result in zip(running.parts, _results(running, result), strict=True):
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
            compute_seconds=session.compute_seconds + seconds * own_rows / rows,
        )
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
        state, reports = report_costs(replace(state, cost=state.cost.observe(rows, seconds)))
        effects.extend(reports)
    return state, (*_with_batch_remaining(verdicts), *effects)


def _results(running: Pass, result: object) -> Sequence[object]:
    """The result of each part."""
    if isinstance(running.job, Forward):
        return (result,)
    if not isinstance(result, tuple) or len(result) != len(running.parts):
        raise LocalProtocolError("the device has not computed the passes it was asked for")
    return result


def _names(job: Forward | Batch) -> tuple[tuple[SessionId, SegmentId], ...]:
    passes = job.passes if isinstance(job, Batch) else (job,)
    return tuple([(one.session, one.segment) for one in passes])


def _with_batch_remaining(verdicts: Sequence[Send]) -> Sequence[Send]:
    """Verdicts of one pass, each with the number of those behind it on its link."""
    found: list[Send] = []
    behind: Counter[Rank] = Counter()
    for send in reversed(verdicts):
        remaining = behind[send.to]
        message = replace(send.message, batch_remaining=remaining) if remaining else send.message
        found.append(replace(send, message=message))
        behind[send.to] += 1
    return found[::-1]


def _verdict(
    session: StageSession, part: PassPart, result: object, alive: Sequence[int], now: float
) -> Send | None:
    """The verdict on the rows that are alive, with features if the session wants them."""
    segment, sampled, opening = part.segment, part.job.sampled_rows, session.opening
    output = result if isinstance(result, SamplerOutput) else SamplerOutput(result)  # type: ignore[arg-type]
    tokens, top_tokens, log_probs = output.tokens, output.top_tokens, output.token_log_probs
    if not isinstance(tokens, tuple) or len(tokens) != len(sampled):
        raise LocalProtocolError("the device verified other rows than it was asked to")
    if (
        (output.features is not None) != bool(opening.features)
        or len(top_tokens) != (len(tokens) if opening.top_logprobs else 0)
        or len(log_probs) != (len(tokens) if opening.log_probs else 0)
    ):
        raise LocalProtocolError("the device gave something to a session that wants none, or none")
    ids, live = segment.ids, set(alive)
    verified = [i for i, row in enumerate(sampled) if row in live]
    features = None
    if output.features is not None and alive:
        features = TensorRows(output.features, tuple(alive))
    if not verified and features is None:
        return None
    tops = [top_tokens[i] for i in verified] if top_tokens else []
    message = Verdict(
        session=opening.session,
        segment=segment.segment,
        applied=applied(session, segment),
        ids=tuple([ids[sampled[i]] for i in verified]),
        tokens=tuple([tokens[i] for i in verified]),
        feature_ids=() if features is None else tuple([ids[row] for row in alive]),
        top_tokens=tuple([token for some, _ in tops for token in some]),
        top_token_log_probs=tuple([log_prob for _, some in tops for log_prob in some]),
        token_log_probs=tuple([log_probs[i] for i in verified]) if log_probs else (),
        stage_seconds=segment.stage_seconds(now),
        pass_number=segment.pass_number,
    )
    return Send(owner(opening.session), message, features)
