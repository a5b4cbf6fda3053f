"""Requests, their tokens and their rounds, from the steps of the draft nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from asyncspec.core import machine
from asyncspec.trace.analysis.log import LogStep, NodeLog
from asyncspec.trace.analysis.segments import Name, Path
from asyncspec.trace.analysis.timeline import Request, Round, Token
from asyncspec.trace.records import Emitted, RequestEnd, Text


@dataclass
class _Progress:
    """A session: tokens in all, and the open round."""

    request: int
    started: float
    done: int = 0
    tokens: int = 0
    rounds: int = 0


class Answers:
    """What users asked and got of one draft node.

    ``lifetimes``: index of a segment's lifetime; ``seen``: when any node first worked on a session.
    """

    def __init__(
        self,
        life: NodeLog,
        paths: Mapping[int, Path],
        lifetimes: Mapping[Name, int],
        seen: Mapping[int, float],
    ) -> None:
        self._paths, self._lifetimes, self._seen = paths, lifetimes, seen
        self._start = life.steps[0].at if life.steps else 0.0
        self._progress: dict[int, _Progress] = {}
        self.requests: dict[int, Request] = {}
        self.tokens: list[Token] = []
        # The step that emitted each token.
        self.steps: list[LogStep] = []
        self.rounds: list[Round] = []
        given: Counter[int] = Counter()
        for step in life.steps:
            if isinstance(step.input, machine.Submitted):
                asked = step.input.request
                self.requests[asked.request] = Request(asked.request, step.at, policy=asked.policy)
            for effect in step.effects:
                match effect:
                    case Emitted(request, tokens):
                        self._emitted(step, effect, given[request])
                        given[request] += len(tokens)
                    case RequestEnd(request, reason, session):
                        old = self._request(request, session)
                        self.requests[request] = replace(old, finished=step.at, reason=reason)
                        if session in self._progress and self._progress[session].tokens:
                            self._end_round(session, step.at, "finish")
                    case _:
                        pass
        self._texts([line for line in life.others if isinstance(line, Text)])

    def _request(self, request: int, session: int) -> Request:
        """Of a request that was there when the recording began, its submission is taken to be
        then: at the first step of the draft node, or of another node that worked on it before."""
        submitted = min(self._start, self._seen.get(session, self._start))
        return self.requests.get(request) or Request(request, submitted)

    def _emitted(self, step: LogStep, emitted: Emitted, start: int) -> None:
        """Tokens with the segments that brought them. A token that was no node ends a round; the
        one after the prompt opens the first."""
        request, session = emitted.request, emitted.session
        self.requests[request] = self._request(request, session)
        mine = self._progress.setdefault(session, _Progress(request, step.at))
        segments = self._paths.get(session, Path()).segments[mine.done :]
        first = not mine.done
        for depth, token in enumerate(emitted.tokens):
            segment = segments[depth] if depth < len(segments) else -1
            lifetime = self._lifetimes.get((session, segment), -1)
            hit = depth < emitted.hits
            self.tokens.append(Token(request, start + depth, token, step.at, lifetime, hit, depth))
            self.steps.append(step)
        mine.done += len(emitted.tokens)
        mine.tokens += len(emitted.tokens)
        if first:
            mine.started, mine.tokens = step.at, 0
        elif emitted.hits < len(emitted.tokens):
            self._end_round(session, step.at, "miss")

    def _end_round(self, session: int, at: float, end: str) -> None:
        mine = self._progress[session]
        self.rounds.append(
            Round(mine.request, session, mine.rounds, mine.started, at, mine.tokens, end)
        )
        mine.rounds += 1
        mine.started, mine.tokens = at, 0

    def _texts(self, texts: list[Text]) -> None:
        """Where text was recorded: that of several tokens at once belongs to the first of them."""
        place = {(token.request, token.index): i for i, token in enumerate(self.tokens)}
        heard: Counter[int] = Counter()
        for line in texts:
            start = heard[line.request]
            heard[line.request] += len(line.tokens)
            at = place.get((line.request, start if line.tokens else start - 1))
            if at is not None:
                old = self.tokens[at]
                self.tokens[at] = replace(old, text=old.text + line.text)
