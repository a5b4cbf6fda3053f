"""Requests, their tokens and their rounds, from the draft node's steps. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from asyncspec.trace import records
from asyncspec.trace.log import Life, LogStep
from asyncspec.trace.paths import Path
from asyncspec.trace.timeline import Request, Round, Token
from asyncspec_protocol.messages import Verdict


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
    """How far a session has been followed."""

    done: int = 0
    started: float = 0.0
    tokens: int = 0
    number: int = 0


def read_answers(
    life: Life, paths: Mapping[int, Path], journeys: Mapping[tuple[int, int], int]
) -> Answers:
    """Follow one draft node. ``journeys``: index of a segment's journey."""
    answers = Answers()
    progress: dict[int, _Progress] = {}
    for step in life.steps:
        if isinstance(step.input, records.Submitted):
            _submitted(answers, step, step.input)
        session = _session_of(step)
        for effect in step.effects:
            match effect:
                case records.Emitted(request, tokens):
                    _emitted(answers, step, request, session, tokens)
                    if session in paths:
                        mine = progress.setdefault(session, _Progress(started=step.at))
                        _place(answers, paths[session], mine, journeys, len(tokens), step)
                case records.Finished(request, reason, ended, stats):
                    _finished(answers, step, request, reason, ended, stats)
                    _end_round(answers, progress.get(ended), ended, step.at, "finish")
                case _:
                    pass
    _name(answers, life)
    return answers


def _session_of(step: LogStep) -> int:
    """Tokens are emitted where a verdict comes, for its session."""
    match step.input:
        case records.Received(_, Verdict(session)):
            return int(session)
        case _:
            return -1


def _submitted(answers: Answers, step: LogStep, source: records.Submitted) -> None:
    asked = source.request
    answers.requests[asked.request] = Request(
        asked.request, step.at, None, asked.policy, len(asked.prompt)
    )


def _emitted(
    answers: Answers, step: LogStep, request: int, session: int, tokens: tuple[int, ...]
) -> None:
    start = sum(token.request == request for token in reversed(answers.tokens))
    for i, token in enumerate(tokens):
        answers.tokens.append(Token(request, start + i, token, step.at, depth=i))
        answers.steps.append((step.life, step.index))
    if session >= 0:
        answers.owners[session] = request


def _place(
    answers: Answers,
    path: Path,
    mine: _Progress,
    journeys: Mapping[tuple[int, int], int],
    count: int,
    step: LogStep,
) -> None:
    """Say of the last ``count`` tokens which segments brought them and whether they were hits."""
    for place in range(len(answers.tokens) - count, len(answers.tokens)):
        node = path.at(mine.done)
        following = path.at(mine.done + 1)
        _, segment = path.verdicts.get(node, (-1, -1))
        hit = following >= 0 and following not in path.roots
        token = answers.tokens[place]
        journey = journeys.get((path.session, segment), -1)
        answers.tokens[place] = replace(token, journey=journey, hit=hit)
        mine.done += 1
        mine.tokens += 1
        if following in path.roots:
            # The token after the prompt opens the first round; it is no miss.
            end = "" if mine.done == 1 else "miss"
            _end_round(answers, mine, path.session, step.at, end)


def _end_round(answers: Answers, mine: _Progress | None, session: int, at: float, end: str) -> None:
    if mine is None:
        return
    if end:
        request = answers.owners.get(session, -1)
        answers.rounds.append(
            Round(request, session, mine.number, mine.started, at, mine.tokens, end)
        )
        mine.number += 1
    mine.started, mine.tokens = at, 0


def _finished(
    answers: Answers,
    step: LogStep,
    request: int,
    reason: str,
    session: int,
    stats: dict[str, float],
) -> None:
    old = answers.requests.get(request) or Request(request, 0.0, None, "", 0)
    answers.requests[request] = replace(old, finished=step.at, reason=reason, stats=stats)
    if session >= 0:
        answers.owners[session] = request


def _name(answers: Answers, life: Life) -> None:
    """Sessions of the requests, and the text of tokens where it was recorded."""
    for number, old in answers.requests.items():
        sessions = tuple(sorted(s for s, r in answers.owners.items() if r == number))
        answers.requests[number] = replace(old, sessions=sessions)
    place = {(token.request, token.index): i for i, token in enumerate(answers.tokens)}
    heard: dict[int, int] = {}
    for line in life.others:
        if isinstance(line, records.Said):
            _say(answers, place, heard, line)


def _say(
    answers: Answers, place: dict[tuple[int, int], int], heard: dict[int, int], line: records.Said
) -> None:
    """The text of several tokens at once belongs to the first of them."""
    start = heard.get(line.request, 0)
    heard[line.request] = start + len(line.tokens)
    at = place.get((line.request, start if line.tokens else start - 1))
    if at is None:
        return
    old = answers.tokens[at]
    answers.tokens[at] = replace(old, text=old.text + line.text)
