"""Forward passes end: what is left of a segment goes on or becomes a verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from asyncspec.core.jobs import Batch, Forward, SamplerOutput, TensorRows
from asyncspec.core.machine import Effect, Send
from asyncspec_nodes.roles.verify.flow_control import tell_costs
from asyncspec_nodes.roles.verify.lifecycle import report
from asyncspec_nodes.roles.verify.session import (
    Part,
    Running,
    StageSession,
    Waiting,
    applied,
    count,
    survivors,
)
from asyncspec_nodes.roles.verify.state import Effects, VerifyState
from asyncspec_protocol.errors import LocalProtocolError
from asyncspec_protocol.ids import Rank, SegmentId, SessionId, owner
from asyncspec_protocol.messages import Verdict


def computed(
    state: VerifyState, job: Forward | Batch, result: object, seconds: float, now: float
) -> tuple[VerifyState, Effects]:
    """A pass has ended. Raises ``LocalProtocolError`` where none was in service."""
    running = state.running
    if running is None or (running.job is not job and _names(running.job) != _names(job)):
        raise LocalProtocolError(f"no such {type(job).__name__} is in service: {_names(job)}")
    rows = running.job.row_count
    sessions, closing = dict(state.sessions), dict(state.closing)
    parked: list[Waiting] = []
    effects: list[Effect] = []
    verdicts: list[Send] = []
    seen: set[SessionId] = set()
    for part, own in zip(running.parts, _results(running, result), strict=True):
        name, ids = part.waiting.session, part.waiting.ids
        known = closing if name in closing else sessions
        session = known.get(name)
        if session is None:
            continue  # dropped with a lost peer
        stay = survivors(session, ids)
        share, passes = seconds * len(ids) / rows, int(name not in seen)
        turns = 0 if running.abandoned else passes
        session = count(session, len(ids), len(stay), share, passes=passes, turns=turns)
        known[name] = session
        seen.add(name)
        if known is closing or running.abandoned:
            # Of a pass that was given up there are no rows, also where a draft node names nodes
            # again that it had declared dead.
            continue
        if state.config.last:
            if verdict := _verdict(session, part, own, stay, now):
                verdicts.append(verdict)
        elif stay:
            parked.append(_done(session, part, own, stay))
    over = sorted(seen & closing.keys())
    effects.extend(report(closing.pop(name), kept=name in state.kept) for name in over)
    state = replace(
        state, running=None, sessions=sessions, closing=closing, parked=(*state.parked, *parked)
    )
    if not running.abandoned:
        state, told = tell_costs(replace(state, cost=state.cost.observe(rows, seconds)))
        effects.extend(told)
    return state, (*_together(verdicts), *effects)


def _results(running: Running, result: object) -> Sequence[object]:
    """The result of each part."""
    if isinstance(running.job, Forward):
        return (result,)
    if not isinstance(result, tuple) or len(result) != len(running.parts):
        raise LocalProtocolError("the device has not computed the passes it was asked for")
    return result


def _names(job: Forward | Batch) -> tuple[tuple[SessionId, SegmentId], ...]:
    passes = job.passes if isinstance(job, Batch) else (job,)
    return tuple([(one.session, one.segment) for one in passes])


def _done(session: StageSession, part: Part, result: object, stay: Sequence[int]) -> Waiting:
    """What of a segment is left to send on."""
    waiting = part.waiting
    tokens = waiting.tokens if session.tokens_travel else ()
    hidden = TensorRows(result, tuple(range(len(waiting.ids))))
    return replace(waiting, tokens=tokens, hidden=hidden, passed_over=0).select(stay)


def _together(verdicts: Sequence[Send]) -> Sequence[Send]:
    """Verdicts of one pass, each with the number of those behind it on its link."""
    if len(verdicts) < 2:
        return verdicts
    found: list[Send] = []
    behind: Counter[Rank] = Counter()
    for send in reversed(verdicts):
        more = behind[send.to]
        found.append(
            replace(send, message=replace(send.message, batch_remaining=more)) if more else send
        )
        behind[send.to] += 1
    return found[::-1]


def _verdict(
    session: StageSession, part: Part, result: object, stay: Sequence[int], now: float
) -> Send | None:
    """The verdict of a pass, for the rows that are still alive, with their features if wanted."""
    tokens = result.tokens if isinstance(result, SamplerOutput) else result
    if not isinstance(tokens, tuple) or len(tokens) != len(part.verified):
        raise LocalProtocolError("the device verified other rows than it was asked to")
    more = result if isinstance(result, SamplerOutput) else SamplerOutput(tokens)
    if (
        (more.features is not None) != bool(session.features)
        or len(more.top_tokens) != (len(tokens) if session.tops else 0)
        or len(more.token_log_probs) != (len(tokens) if session.log_probs else 0)
    ):
        raise LocalProtocolError("the device gave something to a session that wants none, or none")
    ids = part.waiting.ids
    alive = set(stay)
    verified = [i for i, row in enumerate(part.verified) if row in alive]
    features = (
        TensorRows(more.features, tuple(stay)) if more.features is not None and stay else None
    )
    if not verified and features is None:
        return None
    message = Verdict(
        session=session.session,
        segment=part.waiting.segment,
        applied=applied(session, part.waiting),
        ids=tuple(ids[part.verified[i]] for i in verified),
        tokens=tuple(tokens[i] for i in verified),
        feature_ids=tuple(ids[row] for row in stay) if features is not None else (),
        top_tokens=tuple(t for i in verified if more.top_tokens for t in more.top_tokens[i][0]),
        top_token_log_probs=tuple(
            p for i in verified if more.top_tokens for p in more.top_tokens[i][1]
        ),
        token_log_probs=tuple(more.token_log_probs[i] for i in verified if more.token_log_probs),
        stage_seconds=part.waiting.spent_by(now),
        pass_number=part.waiting.turn,
    )
    return Send(owner(session.session), message, features)
