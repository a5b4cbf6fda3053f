"""Parts of an answer, and the frame of the parsers that take its text apart step by step. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

from msgspec import Struct

from asyncspec_nodes.chat.calls import Call, CallArguments, CallBegin, CallEnd, CallPart


class Part(Struct, frozen=True):
    """Text of one kind."""

    kind: Literal["content", "reasoning"]
    text: str


AnswerPart = Part | CallPart


class Parser(Protocol):
    """Takes one answer apart. The sum of its parts does not depend on how the text is cut."""

    @property
    def calls(self) -> int:
        """Calls that have begun."""

    def reasoning_tokens(self, starts: Sequence[int]) -> int:
        """How many of an answer's tokens begin within reasoning. ``starts``: where in the text
        each begins, ascending."""

    def feed(self, text: str) -> list[AnswerPart]:
        """What is certain with some more text."""

    def finish(self, *, cut: bool = False) -> list[AnswerPart]:
        """The rest, at the end of the answer. ``cut``: the model had not ended it."""


class WholeCalls:
    """Joins the pieces of calls, for interfaces that send each call as one."""

    def __init__(self) -> None:
        self._name = self._arguments = ""

    def joined(self, parts: Iterable[AnswerPart]) -> list[Part | Call]:
        """With some more parts of the answer: text, and the calls that have ended."""
        ended: list[Part | Call] = []
        for part in parts:
            match part:
                case Part():
                    ended.append(part)
                case CallBegin():
                    self._name, self._arguments = part.name, ""
                case CallArguments():
                    self._arguments += part.text
                case CallEnd():
                    ended.append(Call(self._name, self._arguments))
        return ended


class StepwiseParser:
    """The frame of a ``Parser``. Without ``parallel`` only an answer's first call counts."""

    def __init__(self, *, parallel: bool) -> None:
        self._parallel = parallel
        self._text = ""
        self.calls = 0
        # Whether the call at hand does not count.
        self._dropped = False
        # Characters taken from the text so far, and which of them are reasoning.
        self._taken = 0
        self._reasoning_spans: list[tuple[int, int]] = []

    def feed(self, text: str) -> list[AnswerPart]:
        self._text += text
        parts: list[AnswerPart] = []
        while (step := self._counted_step()) is not None:
            parts += step
        return self._counted(parts)

    def finish(self, *, cut: bool = False) -> list[AnswerPart]:
        rest, self._text = self._text, ""
        self._take(len(rest), 0)
        return self._counted(self._rest(rest, cut=cut))

    def reasoning_tokens(self, starts: Sequence[int]) -> int:
        spans = self._reasoning_spans
        return sum(bisect_left(starts, end) - bisect_left(starts, begin) for begin, end in spans)

    @property
    def _reasons_now(self) -> bool:
        """Whether what is taken from the text next is reasoning."""
        raise NotImplementedError

    def _end_mark(self, text: str) -> int:
        """Characters at the end of a text that ended reasoning and are none of it."""
        return 0

    def _counted_step(self) -> Sequence[AnswerPart] | None:
        text, reasons = self._text, self._reasons_now
        step = self._step()
        taken = text[: len(text) - len(self._text)]
        mark = 0 if self._reasons_now else self._end_mark(taken)
        self._take(len(taken), mark, reasons=reasons)
        return step

    def _take(self, length: int, mark: int, *, reasons: bool | None = None) -> None:
        if self._reasons_now if reasons is None else reasons:
            self._reasoning_spans.append((self._taken, self._taken + length - mark))
        self._taken += length

    def _step(self) -> Sequence[AnswerPart] | None:
        """Take something from the text; None where more of it is needed."""
        raise NotImplementedError

    def _rest(self, text: str, *, cut: bool) -> Sequence[AnswerPart]:
        """The rest of the text, at the end of the answer. ``cut``: see ``finish``."""
        raise NotImplementedError

    def _counted(self, parts: Iterable[AnswerPart]) -> list[AnswerPart]:
        """The parts that count, neighbours of one kind as one."""
        merged: list[AnswerPart] = []
        for part in parts:
            if isinstance(part, CallBegin):
                self._dropped = not self._parallel and self.calls > 0
                self.calls += not self._dropped
            last = merged[-1] if merged else None
            if isinstance(part, Part) and isinstance(last, Part) and part.kind == last.kind:
                merged[-1] = Part(part.kind, last.text + part.text)
            elif isinstance(part, Part) or not self._dropped:
                merged.append(part)
        return merged
