"""OpenAI's responses: the answers, whole or as events. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from asyncspec_nodes.chat import bounded_json
from asyncspec_nodes.chat.calls import Call, CallArguments, CallBegin, CallEnd
from asyncspec_nodes.chat.stepwise import AnswerPart, Part
from asyncspec_nodes.http.api.answers import ChoiceBuffer, RequestContext
from asyncspec_nodes.http.api.chat_answers import ChatCompletion, ChatParameters
from asyncspec_nodes.http.api.completions import Json
from asyncspec_nodes.http.api.errors import ApiError, event
from asyncspec_protocol.messages import Finished, Submit

NAMES = {
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_tokens": "max_output_tokens",
}
"""Names of parameters, by those of the chat endpoint."""


def _is_cut(end: Finished | None) -> bool:
    """By the limit of tokens."""
    return end is not None and end.reason == "length"


class Response(ChatCompletion):
    """Its answer, whole or as events."""

    names = NAMES
    id_prefix = "resp_"
    prompt_name = "input"
    alive: ClassVar[bytes] = b": alive\n\n"

    def __init__(
        self,
        chat: ChatParameters,
        submits: Sequence[Submit],
        context: RequestContext,
        echoed: Json,
    ) -> None:
        super().__init__(chat, submits, context)
        # What a response repeats of its request.
        self._echoed = echoed
        self._items: list[Any] = []
        self._sequence = 0
        self._open = False

    def body(self, answers: Sequence[ChoiceBuffer]) -> Json:
        self._take(0, answers[0])
        self._finish(cut=_is_cut(answers[0].end))
        return self._response(answers)

    def begin(self, answers: Sequence[ChoiceBuffer]) -> bytes:
        response = self._response(())
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def write(self, index: int, answer: ChoiceBuffer) -> bytes:
        frames = self._take(index, answer)
        answer.clear()
        return frames

    def end(self, answers: Sequence[ChoiceBuffer]) -> bytes:
        frames = self._finish(cut=_is_cut(answers[0].end))
        response = self._response(answers)
        return frames + self._event(f"response.{response['status']}", response=response)

    def error_frame(self, error: ApiError) -> bytes:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _event(self, event_name: str, /, **data: object) -> bytes:
        self._sequence += 1
        return event(event_name, {"sequence_number": self._sequence - 1, **data})

    def _take(self, index: int, answer: ChoiceBuffer) -> bytes:
        """Take what has come of the answer; the events that tell it. A call that only the limit
        has ended stays open."""
        parts = self.parts(index, answer)
        ends = parts.pop() if _is_cut(answer.end) and parts[-1:] == [CallEnd()] else None
        frames = b"".join(map(self._add, parts))
        if ends is not None and bounded_json.is_valid(self._items[-1]["arguments"]):
            frames += self._add(ends)
        return frames

    def _add(self, part: AnswerPart) -> bytes:
        """Take a part; the events that tell it."""
        match part:
            case CallBegin():
                return self._finish() + self._begin_call(part.name)
            case CallArguments():
                self._items[-1]["arguments"] += part.text
                return self._call_event("delta", delta=part.text)
            case CallEnd():
                item = self._items[-1]
                done = {"arguments": item["arguments"], "name": item["name"]}
                return self._call_event("done", **done) + self._finish()
            case Part():
                return self._add_text(part)

    def _add_text(self, part: Part) -> bytes:
        frames = b""
        kind = "message" if part.kind == "content" else "reasoning"
        if not self._open or self._items[-1]["type"] != kind:
            frames = self._finish() + self._begin_text(kind)
        inside = self._items[-1]["content"][0]
        inside["text"] += part.text
        logprobs: Json = {"logprobs": []} if kind == "message" else {}
        return frames + self._event(
            f"response.{inside['type']}.delta", delta=part.text, **self._place(), **logprobs
        )

    def _begin_call(self, called: str) -> bytes:
        name = self.call_object(0, Call(called, ""))["id"]
        item = {
            "type": "function_call",
            "id": f"fc_{name}",
            "call_id": name,
            "name": called,
            "arguments": "",
            "status": "in_progress",
        }
        return self._begin_item(item)

    def _call_event(self, kind: str, **data: object) -> bytes:
        where = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return self._event(f"response.function_call_arguments.{kind}", **data, **where)

    def _begin_text(self, kind: str) -> bytes:
        number = len(self._items)
        item: Any = {"type": kind, "id": f"{kind[:3]}_{self._id}{number}", "status": "in_progress"}
        if kind == "message":
            inside: Any = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item |= {"role": "assistant", "content": []}
        else:
            inside = {"type": "reasoning_text", "text": ""}
            item |= {"summary": [], "content": []}
        frames = self._begin_item(item)
        frames += self._event("response.content_part.added", part=inside, **self._place())
        item["content"].append(inside)
        return frames

    def _begin_item(self, item: Any) -> bytes:
        self._items.append(item)
        self._open = True
        index = len(self._items) - 1
        return self._event("response.output_item.added", output_index=index, item=item)

    def _place(self) -> dict[str, object]:
        item = self._items[-1]
        return {"item_id": item["id"], "output_index": len(self._items) - 1, "content_index": 0}

    def _finish(self, *, cut: bool = False) -> bytes:
        """Close the open item. ``cut``: by the limit."""
        if not self._open:
            return b""
        self._open, frames, item = False, b"", self._items[-1]
        item["status"] = "incomplete" if cut else "completed"
        if item["type"] != "function_call":
            inside = item["content"][0]
            logprobs: Json = {"logprobs": []} if item["type"] == "message" else {}
            frames += self._event(
                f"response.{inside['type']}.done", text=inside["text"], **self._place(), **logprobs
            )
            frames += self._event("response.content_part.done", part=inside, **self._place())
        index = len(self._items) - 1
        return frames + self._event("response.output_item.done", output_index=index, item=item)

    def _response(self, answers: Sequence[ChoiceBuffer]) -> Json:
        end = answers[0].end if answers else None
        cut = _is_cut(end)
        usage: Any = None
        if end is not None:
            counts: Any = self._usage(answers)
            usage = {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": counts["completion_tokens_details"],
                "total_tokens": counts["total_tokens"],
            }
        return {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._head["created"],
            "status": "in_progress" if end is None else "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            **self._echoed,
            "model": self._head["model"],
            "output": self._items,
            "usage": usage,
        }
