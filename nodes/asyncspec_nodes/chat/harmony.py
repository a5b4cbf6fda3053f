"""OpenAI's harmony format (gpt-oss): an answer is a row of messages, each on a channel. Pure.

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...``; a call
has its function in the message's header, behind ``to=``, and ends with ``<|call|>``. The prompt
ends with ``<|start|>assistant``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from asyncspec.constraint import text
from asyncspec_nodes.chat.calls import CallArguments, CallBegin, CallEnd, Tool
from asyncspec_nodes.chat.stepwise import AnswerPart, Part, StepwiseParser
from asyncspec_nodes.serving.syntax.families.harmony import CHANNEL
from asyncspec_nodes.serving.text import partial_stop_length

MESSAGE, START = "<|message|>", "<|start|>"

_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_BREAKS = (*_ENDS, START, CHANNEL)
"""What ends a message; the last two belong to the next one."""

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_HEADERS = (CHANNEL, START, "to=")


class HarmonyParser(StepwiseParser):
    """A ``Parser``. Analysis is reasoning; the final channel, comments for the user and whatever
    has no header are content."""

    def __init__(self, tools: Sequence[Tool] = (), *, parallel: bool = True) -> None:
        super().__init__(parallel=parallel)
        self._names = {tool.name for tool in tools}
        self._state: Literal["start", "header", "body"] = "start"
        self._kind: Literal["content", "reasoning", "call"] = "content"
        # Kinds of which something was said, and whether nothing of the message at hand was.
        self._said: set[str] = set()
        self._fresh = True

    @property
    def _reasons_now(self) -> bool:
        return self._state == "body" and self._kind == "reasoning"

    def _end_mark(self, text: str) -> int:
        return next((len(mark) for mark in _ENDS if text.endswith(mark)), 0)

    def _rest(self, text: str, *, cut: bool) -> list[AnswerPart]:
        if self._state == "body":
            return [*self._written(text), *self._ended()]
        # A header that was cut off is none of the content.
        begun = text.lstrip()
        cut = begun.startswith(_HEADERS) or any(header.startswith(begun) for header in _HEADERS)
        return [] if cut else [Part("content", text)]

    def _step(self) -> list[AnswerPart] | None:
        match self._state:
            case "start":
                return self._start()
            case "header":
                return self._header()
            case "body":
                return self._body()

    def _start(self) -> list[AnswerPart] | None:
        """Whether the answer begins with a header."""
        said = self._text.lstrip()
        if said.startswith(_HEADERS):
            self._state = "header"
        elif any(header.startswith(said) for header in _HEADERS):
            return None
        else:
            self._state, self._kind = "body", "content"
        return []

    def _header(self) -> list[AnswerPart] | None:
        header, mark, self._text = self._text.partition(MESSAGE)
        if not mark:
            self._text = header
            return None
        self._state, self._fresh = "body", True
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None and recipient[1] in self._names:
            self._kind = "call"
            return [CallBegin(recipient[1])]
        self._kind = "reasoning" if channel and channel[1] == "analysis" else "content"
        return []

    def _body(self) -> list[AnswerPart] | None:
        places = [(i, mark) for mark in _BREAKS if (i := self._text.find(mark)) >= 0]
        if not places:
            keep = partial_stop_length(self._text, _BREAKS)
            said = self._text[: len(self._text) - keep]
            self._text = self._text[len(said) :]
            return self._written(said) if said else None
        place, mark = min(places)
        said, self._text = self._text[:place], self._text[place:]
        self._text = self._text.removeprefix(mark) if mark in _ENDS else self._text
        self._state = "header"
        return [*self._written(said), *self._ended()]

    def _written(self, said: str) -> list[AnswerPart]:
        """More of the message at hand."""
        if not said:
            return []
        if self._kind == "call":
            return [CallArguments(said)]
        # Two messages of a kind, which the user gets as one text.
        again = self._fresh and self._kind in self._said
        self._fresh = False
        self._said.add(self._kind)
        return [Part(self._kind, f"\n{said}" if again else said)]

    def _ended(self) -> list[AnswerPart]:
        return [CallEnd()] if self._kind == "call" else []


# --- As a grammar. Special tokens are symbols of it; text does not match them.

_ANALYSIS = '<|channel|> "analysis" <|message|> /(?s:.*)/ <|end|> <|start|> "assistant"'


def in_final(grammar: str) -> str:
    """A grammar for the final message, behind any analysis."""
    form = re.sub(r"(?m)^start\s*:", "form:", grammar, count=1)
    return (
        'start: analysis* <|channel|> "final" (" "? <|constrain|> "json")? <|message|> form\n'
        f"analysis: {_ANALYSIS}\n{form}"
    )


def call_grammar(tools: Sequence[Tool]) -> str:
    """A call of one of some tools, behind any analysis."""
    calls = [
        f'"commentary to=functions.{tool.name} " <|constrain|> "json" <|message|> json{i}'
        for i, tool in enumerate(tools)
    ]
    forms = [f"json{i}: {text.of_json(tool.arguments)}" for i, tool in enumerate(tools)]
    return "\n".join(
        (
            "start: analysis* <|channel|> call",
            f"analysis: {_ANALYSIS}",
            f"call: {' | '.join(calls)}",
            *forms,
        )
    )
