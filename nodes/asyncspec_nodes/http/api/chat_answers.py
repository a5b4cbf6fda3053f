"""The JSON objects of a chat's answers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import ClassVar

from asyncspec_nodes.chat.calls import Call, CallArguments, CallBegin
from asyncspec_nodes.chat.stepwise import AnswerPart, Parser, Part, WholeCalls
from asyncspec_nodes.http.api.answers import ChoiceBuffer, RequestContext
from asyncspec_nodes.http.api.completions import Completion, Json
from asyncspec_nodes.http.api.parameters import CompletionParameters
from asyncspec_nodes.http.api.prompt_scores import ranked
from asyncspec_nodes.http.api.token_logprobs import PositionLogprobs, TokenLogprob
from asyncspec_nodes.serving.templates import ChatFacts
from asyncspec_protocol.messages import Finished, Submit


class ChatParameters(CompletionParameters, frozen=True, kw_only=True):
    """What an answer of a chat depends on in its request."""

    @property
    def calls(self) -> int:
        """Calls in the history."""
        raise NotImplementedError

    def parser(self, facts: ChatFacts) -> Parser:
        """The parser of an answer to this request."""
        raise NotImplementedError


class ChatCompletion(Completion):
    full_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"
    prompt_name = "messages"
    first_choice: ClassVar[Json] = {
        "delta": {"role": "assistant", "content": "", "refusal": None},
        "logprobs": None,
    }
    last_choice: ClassVar[Json] = {"delta": {}, "logprobs": None}

    def __init__(
        self, request: ChatParameters, submits: Sequence[Submit], context: RequestContext
    ) -> None:
        super().__init__(request, submits, context)
        self._id, self._facts = context.id, context.facts
        self.parsers = [request.parser(context.facts) for _ in self.submits]
        self._called = [0] * len(self.submits)
        self._earlier = request.calls

    def parts(self, index: int, answer: ChoiceBuffer) -> list[AnswerPart]:
        """What has come of an answer since this was last called."""
        parser = self.parsers[index]
        parts = parser.feed(answer.text)
        if answer.end is None:
            return parts
        return parts + parser.finish(cut=answer.end.reason != "stop")

    def reasoning_tokens(self, answers: Sequence[ChoiceBuffer]) -> int:
        found = zip(self.parsers, answers, strict=True)
        return sum(parser.reasoning_tokens(answer.starts) for parser, answer in found)

    def choice(self, index: int, answer: ChoiceBuffer) -> Json:
        parts = WholeCalls().joined(self.parts(index, answer))
        content = "".join(p.text for p in parts if isinstance(p, Part) and p.kind == "content")
        thought = "".join(p.text for p in parts if isinstance(p, Part) and p.kind == "reasoning")
        calls = [self.call_object(index, part) for part in parts if isinstance(part, Call)]
        message: Json = {
            "role": "assistant",
            "content": content if content or not calls else None,
            "refusal": None,
        }
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        return {"message": message, **self._logprobs_of(answer.logprobs)}

    def extra(self, answers: Sequence[ChoiceBuffer]) -> Json:
        count = self.prompt_logprobs
        return {} if count is None else {"prompt_logprobs": ranked(answers[0].prompt, count)}

    def pieces(self, index: int, answer: ChoiceBuffer) -> Iterator[Json]:
        deltas: list[Json] = []
        for part in self.parts(index, answer):
            if isinstance(part, Part):
                name = "content" if part.kind == "content" else "reasoning_content"
                deltas.append({name: part.text})
            elif isinstance(part, CallBegin):
                number = self._called[index]
                call = self.call_object(index, Call(part.name, ""))
                deltas.append({"tool_calls": [{"index": number, **call}]})
            elif isinstance(part, CallArguments):
                number = self._called[index] - 1
                more = {"index": number, "function": {"arguments": part.text}}
                deltas.append({"tool_calls": [more]})
        logprobs = self._logprobs_of(answer.logprobs)
        if not deltas and (answer.logprobs or (answer.tokens and self._details)):
            deltas.append({"content": ""})
        for delta in deltas:
            yield {"delta": delta, **logprobs}
            logprobs = {"logprobs": None}

    def call_object(self, index: int, call: Call) -> Json:
        """A call as an entry of ``tool_calls``, with the next id."""
        number = self._called[index]
        self._called[index] += 1
        digest = blake2b(f"{self._id} {index} {number}".encode(), digest_size=12).hexdigest()
        match self._facts.syntax:
            case "mistral":  # its templates take no other ids
                name = digest[:9]
            case "kimi-k2":  # its templates show a history's calls by their ids alone
                name = f"functions.{call.name}:{self._earlier + number}"
            case _:
                name = f"call_{digest}"
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": name, "type": "function", "function": function}

    def reason(self, index: int, end: Finished | None) -> str | None:
        reason = super().reason(index, end)
        return "tool_calls" if reason == "stop" and self.parsers[index].calls else reason

    def _logprobs_of(self, logprobs: list[PositionLogprobs]) -> Json:
        tokens = [
            {**_entry(one.chosen), "top_logprobs": list(map(_entry, one.top))} for one in logprobs
        ]
        return {"logprobs": {"content": tokens, "refusal": None} if self._logprobs else None}


def _entry(token: TokenLogprob) -> Json:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.spelled)}
