"""An answer's text as it comes, taken apart into reasoning, content and calls of tools. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from asyncspec_nodes.chat.calls import (
    BEGIN,
    DEEPSEEK_BEGIN,
    DEEPSEEK_END,
    END,
    Call,
    Tool,
    read_calls,
)
from asyncspec_nodes.serving.templates import ChatFacts
from asyncspec_nodes.serving.text import partial_stop_length

THINK, THOUGHT = "<think>", "</think>"


class Part(Struct, frozen=True):
    """Text of one kind."""

    kind: Literal["content", "reasoning"]
    text: str


class AnswerParser:
    """Of one answer. The sum of its parts does not depend on how the text is cut into pieces.

    What begins like a call of one of ``tools`` and is none is content. Blanks around a call are
    none."""

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
        self._tools = tools
        self._parallel = parallel
        opened = facts.reasoning == "open" if opened is None else opened
        self._state: Literal["start", "content", "reasoning", "call", "bare"] = "start"
        # Of the call being read: what begins it, with the blanks before it, and what ends it.
        self._begun = self._ends = ""
        if opened:
            self._state = "reasoning"
        self._reasons = bool(facts.reasoning)
        # The next text is the first of its kind: line breaks before it are none of it.
        self._fresh = opened
        tagged = {"deepseek": {DEEPSEEK_BEGIN: DEEPSEEK_END}}.get(facts.syntax, {BEGIN: END})
        self._markers = tagged if tools else {}
        self._text = ""
        self.calls = 0

    def feed(self, text: str) -> list[Part | Call]:
        """What is certain with some more text."""
        self._text += text
        found: list[Part | Call] = []
        while (step := self._step()) is not None:
            found += step
        return found

    def finish(self) -> list[Part | Call]:
        """The rest, at the end of the answer."""
        text, self._text = self._text, ""
        match self._state:
            case "reasoning":
                return _parts("reasoning", text.rstrip("\n"))
            case "call" | "bare":
                return self._calls(text, text if self._state == "bare" else self._begun + text)
            case _:
                return _parts("content", text.lstrip() if self._fresh else text)

    def _step(self) -> list[Part | Call] | None:
        """Take something from the text; None where more of it is needed."""
        match self._state:
            case "start":
                return self._start()
            case "content":
                return self._content()
            case "reasoning":
                return self._until(THOUGHT)
            case "call":
                before, end, after = self._text.partition(self._ends)
                if not end:
                    return None
                self._text, self._state = after, "content"
                return self._calls(before, f"{self._begun}{before}{end}")
            case "bare":
                return None

    def _start(self) -> list[Part | Call] | None:
        """Before the first character that is no blank."""
        text = self._text.lstrip()
        if not text or (self._reasons and THINK.startswith(text)):
            return None
        if self._reasons and text.startswith(THINK):
            self._text, self._state, self._fresh = text.removeprefix(THINK), "reasoning", True
        elif self._tools and self._bare(text):
            self._text, self._state = text, "bare"
        elif self._tools and any(name.startswith(text) for name in self._names()):
            return None
        else:
            self._text, self._state = text if self._fresh else self._text, "content"
        return []

    def _names(self) -> list[str]:
        return ["[TOOL_CALLS]", "<|python_tag|>", *(tool.name for tool in self._tools)]

    def _bare(self, text: str) -> bool:
        """Whether an answer may be calls without a marker: JSON, or a tool's name before JSON."""
        if text[0] in "{[":
            return True
        return any(
            text.startswith((f"{tool.name}{{", f"{tool.name}[")) for tool in self._tools
        ) or text.startswith("<|python_tag|>")

    def _content(self) -> list[Part | Call] | None:
        found = [(i, mark) for mark in self._markers if (i := self._text.find(mark)) >= 0]
        if found:
            place, mark = min(found)
            text, self._text = self._text[:place], self._text[place + len(mark) :]
            said = text.rstrip()
            self._state, self._ends = "call", self._markers[mark]
            self._begun = text[len(said) :] + mark
            return _parts("content", said)
        keep = partial_stop_length(self._text, tuple(self._markers))
        # Blanks before a call are no content.
        while self._markers and keep < len(self._text) and self._text[-keep - 1].isspace():
            keep += 1
        text, self._text = (
            self._text[: len(self._text) - keep],
            self._text[len(self._text) - keep :],
        )
        return _parts("content", text) or None

    def _until(self, end: str) -> list[Part | Call] | None:
        if self._fresh:
            self._text = self._text.lstrip("\n")
            self._fresh = not self._text
        text, found, after = self._text.partition(end)
        if found:
            self._text, self._state = after, "start"
            self._reasons, self._fresh = False, True
            return _parts("reasoning", text.rstrip("\n"))
        keep = partial_stop_length(self._text, (end,))
        while keep < len(self._text) and self._text[-keep - 1] == "\n":
            keep += 1
        text, self._text = (
            self._text[: len(self._text) - keep],
            self._text[len(self._text) - keep :],
        )
        return _parts("reasoning", text) or None

    def _calls(self, body: str, raw: str) -> list[Part | Call]:
        calls = read_calls(body, self._tools)
        if calls is None:
            return _parts("content", raw)
        if not self._parallel:
            calls = calls[: max(0, 1 - self.calls)]
        self.calls += len(calls)
        return [*calls]


def _parts(kind: Literal["content", "reasoning"], text: str) -> list[Part | Call]:
    return [Part(kind, text)] if text else []
