"""An answer's text as it comes, taken apart into reasoning, content and calls of tools. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

from msgspec import Struct

from asyncspec_nodes.chat.arguments import Arguments
from asyncspec_nodes.chat.calls import (
    MARKS,
    Call,
    CallArguments,
    CallBegin,
    CallEnd,
    CallPart,
    CallPattern,
    Tool,
    is_text,
    read_calls,
)
from asyncspec_nodes.serving.templates import SYNTAXES, ChatFacts
from asyncspec_nodes.serving.text import partial_stop_length


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

    def feed(self, text: str) -> list[AnswerPart]:
        """What is certain with some more text."""

    def finish(self) -> list[AnswerPart]:
        """The rest, at the end of the answer."""


class WholeCalls:
    """Joins the pieces of calls, for interfaces that send each call as one."""

    def __init__(self) -> None:
        self._name = self._arguments = ""

    def joined(self, parts: Iterable[AnswerPart]) -> list[Part | Call]:
        """With some more parts of the answer: text, and the calls that have ended."""
        found: list[Part | Call] = []
        for part in parts:
            match part:
                case Part():
                    found.append(part)
                case CallBegin():
                    self._name, self._arguments = part.name, ""
                case CallArguments():
                    self._arguments += part.text
                case CallEnd():
                    found.append(Call(self._name, self._arguments))
        return found


class StepwiseParser:
    """The frame of a ``Parser``. Without ``parallel`` only an answer's first call counts."""

    def __init__(self, *, parallel: bool) -> None:
        self._parallel = parallel
        self._text = ""
        self.calls = 0
        # Whether the call at hand does not count.
        self._dropped = False

    def feed(self, text: str) -> list[AnswerPart]:
        self._text += text
        found: list[AnswerPart] = []
        while (step := self._step()) is not None:
            found += step
        return self._counted(found)

    def finish(self) -> list[AnswerPart]:
        rest, self._text = self._text, ""
        return self._counted(self._rest(rest))

    def _step(self) -> Sequence[AnswerPart] | None:
        """Take something from the text; None where more of it is needed."""
        raise NotImplementedError

    def _rest(self, text: str) -> Sequence[AnswerPart]:
        """The rest of the text, at the end of the answer."""
        raise NotImplementedError

    def _counted(self, parts: Iterable[AnswerPart]) -> list[AnswerPart]:
        found = []
        for part in parts:
            if isinstance(part, CallBegin):
                self._dropped = not self._parallel and self.calls > 0
                self.calls += not self._dropped
            if isinstance(part, Part) or not self._dropped:
                found.append(part)
        return found


class AnswerParser(StepwiseParser):
    """A ``Parser`` of reasoning in tags, and calls in tags or, as the whole answer, without.

    What begins like a call of one of ``tools`` and is none is content. Blanks around a call are
    none. A call's arguments are passed on as they are written, once its name is known."""

    def __init__(
        self,
        facts: ChatFacts,
        tools: Sequence[Tool] = (),
        *,
        parallel: bool = True,
        opened: bool | None = None,
    ) -> None:
        """``parallel``: more than one call counts. ``opened``: whether the answer begins with
        reasoning, where that is not the template's habit."""
        super().__init__(parallel=parallel)
        self._tools = tools
        self._pattern = CallPattern(tools)
        # Of the call whose arguments are being read.
        self._arguments: Arguments | None = None
        # Whether a call was read since the last marker.
        self._read = False
        opened = facts.opened({}) if opened is None else opened
        self._state: Literal["start", "content", "reasoning", "call", "bare"] = "start"
        # Of the call being read: what begins it, with the blanks before it, and what ends it.
        self._begun = self._ends = ""
        if opened:
            self._state = "reasoning"
        self._reasons = bool(facts.reasoning)
        # The next text is the first of its kind: line breaks before it are none of it.
        self._fresh = opened
        syntax = SYNTAXES[facts.syntax]
        begin, end = syntax.around
        # A call that begins without a marker: it ends like others, or with the answer.
        self._bare_call = syntax.bare
        self._markers = {mark: end for mark in (begin, syntax.bare) if mark} if tools else {}
        self._think, self._thought = syntax.reasoning

    def _rest(self, text: str) -> Sequence[AnswerPart]:
        match self._state:
            case "reasoning":
                return _parts("reasoning", text.rstrip("\n"))
            case "call" | "bare":
                if self._arguments is not None:
                    return [*_arguments(text), CallEnd()]
                return self._block(text, self._begun + text)
            case _:
                return _parts("content", text.lstrip() if self._fresh else text)

    def _step(self) -> Sequence[AnswerPart] | None:
        match self._state:
            case "start":
                return self._start()
            case "content":
                return self._content()
            case "reasoning":
                return self._until(self._thought)
            case "call" | "bare":
                return self._call()

    def _start(self) -> Sequence[AnswerPart] | None:
        """Before the first character that is no blank."""
        text = self._text.lstrip()
        if not text or (self._reasons and self._think.startswith(text)):
            return None
        if self._reasons and text.startswith(self._think):
            self._text, self._state, self._fresh = text.removeprefix(self._think), "reasoning", True
        elif self._tools and self._bare(text):
            self._text, self._state, self._begun = text, "bare", ""
        elif self._tools and any(name.startswith(text) for name in self._names()):
            return None
        else:
            self._text, self._state = text if self._fresh else self._text, "content"
        return []

    def _names(self) -> list[str]:
        return [*MARKS, *(tool.name for tool in self._tools)]

    def _bare(self, text: str) -> bool:
        """Whether an answer may be calls without a marker: JSON, or a tool's name before JSON."""
        if text[0] in "{[":
            return True
        return any(
            text.startswith((f"{tool.name}{{", f"{tool.name}[")) for tool in self._tools
        ) or text.startswith("<|python_tag|>")

    def _content(self) -> Sequence[AnswerPart] | None:
        found = [(i, mark) for mark in self._markers if (i := self._text.find(mark)) >= 0]
        if found:
            place, mark = min(found)
            self._state, self._ends = "call", self._markers[mark]
            if mark == self._bare_call:
                mark = ""  # a part of the call
            text, self._text = self._text[:place], self._text[place + len(mark) :]
            said = text.rstrip()
            self._begun = text[len(said) :] + mark
            return _parts("content", said)
        end = len(self._text) - partial_stop_length(self._text, tuple(self._markers))
        if self._markers:  # blanks before a call are no content
            end = len(self._text[:end].rstrip())
        text, self._text = self._text[:end], self._text[end:]
        return _parts("content", text) or None

    def _until(self, end: str) -> Sequence[AnswerPart] | None:
        if self._fresh:
            self._text = self._text.lstrip("\n")
            self._fresh = not self._text
        text, found, after = self._text.partition(end)
        if found:
            self._text, self._state = after, "start"
            self._reasons, self._fresh = False, True
            return _parts("reasoning", text.rstrip("\n"))
        certain = len(self._text) - partial_stop_length(self._text, (end,))
        certain = len(self._text[:certain].rstrip("\n"))
        text, self._text = self._text[:certain], self._text[certain:]
        return _parts("reasoning", text) or None

    def _call(self) -> Sequence[AnswerPart] | None:
        """Inside of what may be calls."""
        if self._arguments is not None:
            written, self._text, ended = self._arguments.feed(self._text)
            if ended:
                self._arguments = None
                return [*_arguments(written), CallEnd()]
            return _arguments(written) or None
        if (found := self._pattern.match(self._text)) is not None:
            begin, self._arguments, self._text = found
            self._read = True
            return [begin]
        if self._state == "bare":
            if self._read or self._pattern.possible(self._text):
                return None
            self._state = "content"
            return []
        before, end, after = self._text.partition(self._ends)
        if not end:
            return None
        self._text, self._state = after, "content"
        return self._block(before, f"{self._begun}{before}{end}")

    def _block(self, rest: str, raw: str) -> Sequence[AnswerPart]:
        """The rest of what may be calls; ``raw`` is what it is as content if none was read."""
        if self._read:
            self._read = False
            return _parts("content", rest) if is_text(rest) else ()
        calls = read_calls(rest, self._tools)
        if calls is None:
            return _parts("content", raw)
        return [part for one in calls for part in whole_call(one)]


def whole_call(call: Call) -> tuple[AnswerPart, ...]:
    """A call that came in one piece."""
    return CallBegin(call.name), CallArguments(call.arguments), CallEnd()


def _arguments(text: str) -> list[CallArguments]:
    return [CallArguments(text)] if text else []


def _parts(kind: Literal["content", "reasoning"], text: str) -> list[Part]:
    return [Part(kind, text)] if text else []
