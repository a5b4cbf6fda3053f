"""Requests, their tokens and their rounds, from the draft node's steps. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from asyncspec.core import machine
from asyncspec.trace import records
from asyncspec.trace.analysis.log import Log, LogStep, NodeLog
from asyncspec.trace.analysis.segments import Path
from asyncspec.trace.analysis.timeline import Instant, Request, Round, Token
from asyncspec_protocol.messages import PruneIndices


@dataclass
class Answers:
    """What users asked and got."""

    requests: dict[int, Request] = field(default_factory=dict)
    tokens: list[Token] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    # The request of a session.
    owners: dict[int, int] = field(default_factory=dict)
    # The step that emitted a token, by its place in ``tokens``: life and index.
    steps: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class _Progress:
    """How far a session has been followed: tokens in all, and the open round."""

    done: int = 0
    started: float = 0.0
    tokens: int = 0
    rounds: int = 0


def read_answers(
    life: NodeLog,
    paths: Mapping[int, Path],
    lifetimes: Mapping[tuple[int, int], int],
    seen: Mapping[int, float],
) -> Answers:
    """Follow one draft node. ``lifetimes``: index of a segment's lifetime; ``seen``: when any node
    worked on a session first."""
    answers = Answers()
    progress: dict[int, _Progress] = {}
    given: Counter[int] = Counter()
    for step in life.steps:
        if isinstance(step.input, machine.Submitted):
            _submitted(answers, step, step.input)
        for effect in step.effects:
            match effect:
                case records.Emitted(request, tokens, _, session):
                    answers.requests.setdefault(request, _earlier(request, session, life, seen))
                    answers.owners[session] = request
                    mine = progress.setdefault(session, _Progress(started=step.at))
                    path = paths.get(session) or Path(session)
                    for token in _tokens(step, effect, given[request], path, mine, lifetimes):
                        answers.tokens.append(token)
                        answers.steps.append((step.life, step.index))
                    given[request] += len(tokens)
                    _rounds(answers, effect, mine, step.at)
                case records.RequestEnd(request, reason, session, stats):
                    old = answers.requests.get(request) or _earlier(request, session, life, seen)
                    ended = replace(old, finished=step.at, reason=reason, stats=stats)
                    answers.requests[request] = ended
                    if session in progress and progress[session].tokens:
                        _end_round(answers, session, progress[session], step.at, "finish")
                case _:
                    pass
    _name(answers, life)
    return answers


def _earlier(request: int, session: int, life: NodeLog, seen: Mapping[int, float]) -> Request:
    """One that was there when the recording began: as far as can be told, it came then. Others may
    have been at work on it before the draft node's first step."""
    first = life.steps[0].at
    return Request(request, min(first, seen.get(session, first)), None, "", 0)


def _submitted(answers: Answers, step: LogStep, source: machine.Submitted) -> None:
    asked = source.request
    answers.requests[asked.request] = Request(
        asked.request, step.at, None, asked.policy, len(asked.prompt)
    )


def _tokens(
    step: LogStep,
    emitted: records.Emitted,
    start: int,
    path: Path,
    mine: _Progress,
    lifetimes: Mapping[tuple[int, int], int],
) -> Iterator[Token]:
    """With the segments that brought them."""
    for depth, token in enumerate(emitted.tokens):
        _, segment = path.verdicts.get(path.at(mine.done + depth), (-1, -1))
        yield Token(
            emitted.request,
            start + depth,
            token,
            step.at,
            lifetimes.get((emitted.session, segment), -1),
            depth < emitted.hits,
            depth,
        )


def _rounds(answers: Answers, emitted: records.Emitted, mine: _Progress, at: float) -> None:
    """A token that was no node ends a round; the one after the prompt opens the first."""
    first = mine.done == 0
    mine.done += len(emitted.tokens)
    mine.tokens += len(emitted.tokens)
    if first:
        mine.started, mine.tokens = at, 0
    elif emitted.hits < len(emitted.tokens):
        _end_round(answers, emitted.session, mine, at, "miss")


def _end_round(answers: Answers, session: int, mine: _Progress, at: float, end: str) -> None:
    request = answers.owners.get(session, -1)
    answers.rounds.append(Round(request, session, mine.rounds, mine.started, at, mine.tokens, end))
    mine.rounds += 1
    mine.started, mine.tokens = at, 0


def _name(answers: Answers, life: NodeLog) -> None:
    """Sessions of the requests, and the text of tokens where it was recorded."""
    for number, old in answers.requests.items():
        sessions = tuple(sorted(s for s, r in answers.owners.items() if r == number))
        answers.requests[number] = replace(old, sessions=sessions)
    place = {(token.request, token.index): i for i, token in enumerate(answers.tokens)}
    heard: dict[int, int] = {}
    for line in life.others:
        if isinstance(line, records.Text):
            _say(answers, place, heard, line)


def _say(
    answers: Answers, place: dict[tuple[int, int], int], heard: dict[int, int], line: records.Text
) -> None:
    """The text of several tokens at once belongs to the first of them."""
    start = heard.get(line.request, 0)
    heard[line.request] = start + len(line.tokens)
    at = place.get((line.request, start if line.tokens else start - 1))
    if at is None:
        return
    old = answers.tokens[at]
    answers.tokens[at] = replace(old, text=old.text + line.text)


# --- Moments worth a instant. Pure.


def read_instants(log: Log, answers: Answers) -> list[Instant]:
    """All of them, in order of time."""
    instants = [instant for life in log.lives for step in life.steps for instant in _of_step(step)]
    instants += [
        Instant(0, round_.until, round_.end, round_.session, f"{round_.tokens} tokens")
        for round_ in answers.rounds
        if round_.end == "miss"
    ]
    return sorted(instants, key=lambda instant: (instant.at, instant.rank))


def _of_step(step: LogStep) -> Iterator[Instant]:
    rank, at = step.rank, step.at
    if step.error:
        yield Instant(rank, at, "error", text=step.error)
    match step.input:
        case machine.Submitted(asked):
            yield Instant(rank, at, "submit", text=f"request {asked.request}, {asked.policy}")
        case machine.LinkUp(peer):
            yield Instant(rank, at, "joined", text=f"rank {peer}")
        case machine.LinkDown(peer, reason):
            yield Instant(rank, at, "lost", text=f"rank {peer}: {reason}")
        case records.ReceivedMessage(_, PruneIndices(named, version, _, _, keep)):
            yield Instant(rank, at, "prune", named, f"version {version} keeps {len(keep)}")
        case _:
            pass
    pruned = False
    for effect in step.effects:
        match effect:
            case records.Sent(1, "open", session):
                yield Instant(rank, at, "open", session)
            case records.Sent(_, "prune", session, _, count) if not pruned:
                pruned = True
                yield Instant(rank, at, "prune", session, f"keeps {count}")
            case records.Emitted(request, tokens):
                yield Instant(rank, at, "emit", text=f"request {request}: {len(tokens)} tokens")
            case records.RequestEnd(request, reason, session):
                yield Instant(rank, at, "finish", session, f"request {request}: {reason}")
            case _:
                pass
