"""An answer's text as it comes, taken apart into reasoning, content and calls of tools. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from asyncspec_nodes.chat.arguments import Arguments
from asyncspec_nodes.chat.calls import (
    Call,
    CallArguments,
    CallBegin,
    CallEnd,
    Tool,
    read_calls,
)
from asyncspec_nodes.chat.pattern import MAX_BEGINNING, CallPattern, is_text
from asyncspec_nodes.chat.stepwise import AnswerPart, Part, StepwiseParser
from asyncspec_nodes.serving.syntax.registry import SYNTAXES
from asyncspec_nodes.serving.syntax.table import Syntax
from asyncspec_nodes.serving.templates import ChatFacts
from asyncspec_nodes.serving.text import partial_stop_length

_MARKS: Mapping[str, str] = {
    begin: end for syntax in SYNTAXES.values() for begin, end in reversed(syntax.around)
}
"""What begins calls in any family, and what ends them."""


def _bare_of(syntax: Syntax) -> dict[str, str]:
    return {mark: end for _, end in syntax.around[:1] for mark in syntax.bare}


_BARE: Mapping[str, str] = {
    mark: end for syntax in reversed([*SYNTAXES.values()]) for mark, end in _bare_of(syntax).items()
}
"""What begins a call without marks around it, and what may end it all the same."""


class AnswerParser(StepwiseParser):
    """A ``Parser`` of reasoning between marks, and calls between marks or, as the whole answer,
    without.

    What begins like a call of one of ``tools`` and is none is content, or reasoning within that.
    Blanks around a call are none. A call's arguments are passed on as they are written, once its
    name is known. A call within reasoning is one, as the model waits for its result."""

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
        # Text of any kind would be a call of a tool without a name.
        self._tools = tools = [tool for tool in tools if tool.name]
        self._pattern = CallPattern(tools, facts.syntax)
        # Reader of the call whose arguments are being read.
        self._arguments: Arguments | None = None
        # Whether a call was read since the last marker.
        self._read = False
        opened = facts.opened({}) if opened is None else opened
        self._state: Literal["start", "content", "reasoning", "call", "bare"] = "start"
        # What begins the call being read, with the blanks before it, and what ends it.
        self._begun = self._ends = ""
        # What calls interrupt: content, or reasoning.
        self._around: Literal["content", "reasoning"] = "content"
        if opened:
            self._state = self._around = "reasoning"
        self._reasons = bool(facts.reasoning)
        # The next text is the first of its kind: line breaks before it are none of it.
        self._fresh = opened
        syntax = SYNTAXES[facts.syntax]
        # Where a call begins, and where it ends.
        marks = {**_BARE, **_bare_of(syntax), **_MARKS, **dict(syntax.around)}
        self._markers = marks if tools else {}
        self._thinks = dict(syntax.reasoning)
        self._thoughts = tuple(self._thinks.values())
        self._wraps = dict(syntax.wraps)
        # What ends the content, and is none of it.
        self._wrap_end = ""

    @property
    def _reasons_now(self) -> bool:
        return self._around == "reasoning" and self._arguments is None

    def _end_mark(self, text: str) -> int:
        return next((len(mark) for mark in self._thoughts if text.endswith(mark)), 0)

    def _rest(self, text: str, *, cut: bool) -> Sequence[AnswerPart]:
        match self._state:
            case "reasoning":
                return _parts("reasoning", text.rstrip("\n"))
            case "call" | "bare":
                return self._rest_of_call(text, cut=cut)
            case _:
                return _parts("content", text.lstrip() if self._fresh else text)

    def _rest_of_call(self, text: str, *, cut: bool) -> Sequence[AnswerPart]:
        parts: list[AnswerPart] = []
        begun, further = self._begun + text, self._read
        # What would end the call makes up for an end that the model left out.
        if self._arguments is None and not cut:
            call = self._pattern.match(text + self._ends, further=further)
            if call is not None:
                begin, self._arguments, text = call
                parts.append(begin)
        if self._arguments is None:
            return [*parts, *self._block(text, begun)]
        # Cut short, the arguments stay as far as they are certain: completed they would be others.
        if cut:
            return [*parts, CallEnd()]
        written, text, ended = self._arguments.feed(text)
        if not ended:
            more, text = self._arguments.close(text)
            written += more
        self._arguments, self._read = None, True
        parts += [*_arguments(written), CallEnd()]
        return [*parts, *self._block(text.removesuffix(self._ends), "")]

    def _step(self) -> Sequence[AnswerPart] | None:
        match self._state:
            case "start":
                return self._start()
            case "content":
                return self._content()
            case "reasoning":
                return self._reasoning()
            case "call" | "bare":
                return self._call()

    def _start(self) -> Sequence[AnswerPart] | None:
        """Before the first character that is no blank."""
        text = self._text.lstrip()
        heads = (*(self._thinks if self._reasons else ()), *self._wraps)
        if not text:
            return None
        head = next((mark for mark in heads if text.startswith(mark)), None)
        if head is not None:
            self._text, self._fresh = text.removeprefix(head), True
            if head in self._wraps:
                self._wrap_end, self._reasons = self._wraps[head], False
                self._wraps = {}
            else:
                self._state = self._around = "reasoning"
                self._thoughts = (self._thinks[head],)
        elif any(name.startswith(text) for name in (*heads, *self._names())):
            return None
        elif self._tools and self._bare(text):
            self._text, self._state, self._begun, self._ends = text, "bare", "", ""
        else:
            self._text, self._state = text if self._fresh else self._text, "content"
        return []

    def _names(self) -> list[str]:
        """What calls may begin with."""
        names = [f"{tool.name}\n{{" for tool in self._tools]
        return [*self._markers, *names, "```json"] if names else []

    def _bare(self, text: str) -> bool:
        """Whether an answer may be calls without a marker: JSON, or a tool's name before JSON."""
        if any(text.startswith(mark) for mark in self._markers):
            return False
        return (
            text[0] in "{["
            or text.startswith(("```json", "```python"))
            or any(
                text.startswith((f"{tool.name}{{", f"{tool.name}[", f"{tool.name}\n{{"))
                for tool in self._tools
            )
        )

    def _found(self, marks: Iterable[str]) -> tuple[int, str] | None:
        """The first of some marks in the text, and its place; of several there, the longest."""
        places = [(place, mark) for mark in marks if (place := self._text.find(mark)) >= 0]
        return min(places, key=lambda item: (item[0], -len(item[1])), default=None)

    def _content(self) -> Sequence[AnswerPart] | None:
        marks = (*self._markers, *((self._wrap_end,) if self._wrap_end else ()))
        mark_here = self._found(marks)
        if mark_here is None:
            return self._passed("content", marks)
        place, mark = mark_here
        if mark != self._wrap_end:
            return self._begin_call("content", place, mark)
        said, self._text = self._text[:place], self._text[place + len(mark) :]
        self._wrap_end = ""
        return _parts("content", said.rstrip("\n"))

    def _passed(
        self, kind: Literal["content", "reasoning"], marks: tuple[str, ...]
    ) -> Sequence[AnswerPart] | None:
        """All of the text that no mark can begin in."""
        end = len(self._text) - partial_stop_length(self._text, marks)
        if kind == "reasoning":
            end = len(self._text[:end].rstrip("\n" if not self._markers else None))
        elif self._markers or self._wrap_end:  # blanks before a call are no content
            end = len(self._text[:end].rstrip())
        text, self._text = self._text[:end], self._text[end:]
        return _parts(kind, text) or None

    def _begin_call(
        self, kind: Literal["content", "reasoning"], place: int, mark: str
    ) -> Sequence[AnswerPart]:
        self._state, self._ends, self._around = "call", self._markers[mark], kind
        if mark in _BARE:
            mark = ""  # a part of the call
        text, self._text = self._text[:place], self._text[place + len(mark) :]
        said = text.rstrip()
        self._begun = text[len(said) :] + mark
        return _parts(kind, said)

    def _reasoning(self) -> Sequence[AnswerPart] | None:
        if self._fresh:
            self._text = self._text.lstrip("\n")
            self._fresh = not self._text
        marks = (*self._thoughts, *self._markers)
        mark_here = self._found(marks)
        if mark_here is None:
            return self._passed("reasoning", marks)
        place, mark = mark_here
        if mark not in self._thoughts:
            return self._begin_call("reasoning", place, mark)
        text, self._text = self._text[:place], self._text[place + len(mark) :]
        self._state, self._reasons, self._fresh = "start", False, True
        self._around = "content"
        return _parts("reasoning", text.rstrip("\n"))

    def _call(self) -> Sequence[AnswerPart] | None:
        """Inside of what may be calls."""
        if self._arguments is not None:
            written, self._text, ended = self._arguments.feed(self._text)
            if ended:
                self._arguments = None
                return [*_arguments(written), CallEnd()]
            return _arguments(written) or None
        if (call := self._pattern.match(self._text, further=self._read)) is not None:
            begin, self._arguments, self._text = call
            self._read = True
            return [begin]
        if not self._ends:
            return self._unended()
        ends = (self._ends, *(self._thoughts if self._around == "reasoning" else ()))
        end = self._found(ends)
        if end is None:
            return self._unmatched()
        place, mark = end
        text, self._text = self._text[:place], self._text[place:]
        self._state = self._around
        if mark != self._ends:  # the reasoning has ended
            return self._block(text, f"{self._begun}{text}".rstrip("\n"))
        self._text = self._text.removeprefix(mark)
        return self._block(text, f"{self._begun}{text}{mark}")

    def _unended(self) -> Sequence[AnswerPart] | None:
        """What calls without an end may be else."""
        if self._read or self._pattern.possible(self._text):
            return None
        return self._given_back()

    def _unmatched(self) -> Sequence[AnswerPart] | None:
        """What is passed on of calls whose end has not come: reasoning may only talk of calls."""
        long = len(self._text) > MAX_BEGINNING
        if long and not self._read and (self._around == "reasoning" or not self._begun.strip()):
            return self._given_back()
        return None

    def _given_back(self) -> Sequence[AnswerPart]:
        """No call: the text up to here is what it would have interrupted."""
        self._state = self._around
        begun, self._begun = self._begun, ""
        if begun.strip():
            return _parts(self._around, begun)
        # What began the call is in the text, and must not be found again.
        said, self._text = self._text[:1], self._text[1:]
        return _parts(self._around, begun + said)

    def _block(self, rest: str, raw: str) -> Sequence[AnswerPart]:
        """The rest of what may be calls; ``raw`` is what it is as content if none was read."""
        if self._read:
            self._read = False
            return _parts(self._around, rest) if is_text(rest) else ()
        calls = read_calls(rest, self._tools, marked=self._state == "call" or bool(self._ends))
        if calls is None:
            return _parts(self._around, raw)
        return [part for one in calls for part in whole_call(one)]


def whole_call(call: Call) -> tuple[AnswerPart, ...]:
    """A call that came in one piece."""
    return CallBegin(call.name), CallArguments(call.arguments), CallEnd()


def _arguments(text: str) -> list[CallArguments]:
    return [CallArguments(text)] if text else []


def _parts(kind: Literal["content", "reasoning"], text: str) -> list[Part]:
    return [Part(kind, text)] if text else []
