"""Anthropic's messages: the answers, whole or as events. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from asyncspec_nodes.chat.calls import Call, CallArguments, CallBegin, CallEnd
from asyncspec_nodes.chat.stepwise import Part, WholeCalls
from asyncspec_nodes.http.api.answers import ChoiceBuffer
from asyncspec_nodes.http.api.chat_answers import ChatCompletion
from asyncspec_nodes.http.api.completions import Json
from asyncspec_nodes.http.api.errors import ApiError, event
from asyncspec_protocol.messages import Finished

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


NAMES = {
    "json_schema": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
"""Names of parameters, by those of the chat endpoint."""


class AnthropicMessage(ChatCompletion):
    """Its answer, whole or as events."""

    names = NAMES
    counts_prompt = True
    alive: ClassVar[bytes] = b'event: ping\ndata: {"type": "ping"}\n\n'
    _block: str = ""
    _blocks = 0

    def body(self, answers: Sequence[ChoiceBuffer]) -> Json:
        content: list[Json] = []
        for part in WholeCalls().joined(self.parts(0, answers[0])):
            if isinstance(part, Call):
                content.append(self._tool_use(part.name, part.given))
            elif content and content[-1]["type"] == _kind(part):
                content[-1][_field(part)] = f"{content[-1][_field(part)]}{part.text}"
            else:
                content.append(self._opened(part, part.text))
        end = answers[0].end
        return {**self._message(content), **self._ended(end), "usage": self._tokens(answers)}

    def begin(self, answers: Sequence[ChoiceBuffer]) -> bytes:
        cached = answers[0].shared_tokens
        usage = {
            "input_tokens": answers[0].prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": 0,
        }
        started = {**self._message([]), "stop_reason": None, "stop_sequence": None, "usage": usage}
        return event("message_start", {"message": started})

    def write(self, index: int, answer: ChoiceBuffer) -> bytes:
        frames = b""
        for part in self.parts(index, answer):
            if isinstance(part, CallBegin):
                frames += self._close() + self._open("tool_use", self._tool_use(part.name, {}))
                continue
            if isinstance(part, CallArguments):
                frames += self._delta({"type": "input_json_delta", "partial_json": part.text})
                continue
            if isinstance(part, CallEnd):
                frames += self._close()
                continue
            if self._block != _kind(part):
                frames += self._close() + self._open(_kind(part), self._opened(part, ""))
            frames += self._delta({"type": f"{_kind(part)}_delta", _field(part): part.text})
        answer.clear()
        return frames

    def end(self, answers: Sequence[ChoiceBuffer]) -> bytes:
        frames = self._close()
        delta = self._ended(answers[0].end)
        frames += event("message_delta", {"delta": delta, "usage": self._tokens(answers)})
        return frames + event("message_stop", {})

    def error_frame(self, error: ApiError) -> bytes:
        said = {"type": error.body()["error"]["type"], "message": error.message}
        return event("error", {"error": said})

    def _message(self, content: list[Json]) -> Json:
        return {
            "id": f"msg_{self._head['id']}".replace("chatcmpl-", ""),
            "type": "message",
            "role": "assistant",
            "model": self._head["model"],
            "content": content,
        }

    def _ended(self, end: Finished | None) -> Json:
        reason = self.reason(0, end)
        if reason == "stop" and end is not None and end.stop:
            return {"stop_reason": "stop_sequence", "stop_sequence": end.stop}
        return {"stop_reason": _REASONS.get(reason or ""), "stop_sequence": None}

    def _tokens(self, answers: Sequence[ChoiceBuffer]) -> Json:
        usage: Any = self._usage(answers)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {
                "thinking_tokens": usage["completion_tokens_details"]["reasoning_tokens"]
            },
        }

    def _tool_use(self, called: str, arguments: object) -> Json:
        name = self.call_object(0, Call(called, ""))["id"]
        return {"type": "tool_use", "id": name, "name": called, "input": arguments}

    def _opened(self, part: Part, text: str) -> Json:
        signature = {"signature": ""} if part.kind == "reasoning" else {}
        return {"type": _kind(part), _field(part): text, **signature}

    def _open(self, kind: str, block: Json) -> bytes:
        self._block = kind
        return event("content_block_start", {"index": self._blocks, "content_block": block})

    def _delta(self, delta: Json) -> bytes:
        return event("content_block_delta", {"index": self._blocks, "delta": delta})

    def _close(self) -> bytes:
        if not self._block:
            return b""
        self._block = ""
        self._blocks += 1
        return event("content_block_stop", {"index": self._blocks - 1})


def _kind(part: Part) -> str:
    return "text" if part.kind == "content" else "thinking"


_field = _kind
"""The text of a block stands under the name of its kind."""
