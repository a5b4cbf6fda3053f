"""Requests for a prompt's tokens: vLLM's ``/tokenize`` and ``/detokenize``, Anthropic's
``count_tokens``. Pure."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import replace

from asyncspec_nodes.http.api.answers import RequestContext
from asyncspec_nodes.http.api.chat import ChatRequest
from asyncspec_nodes.http.api.chat_messages import ChatMessage, ToolSpec
from asyncspec_nodes.http.api.errors import invalid, renaming
from asyncspec_nodes.plugins.dialects.anthropic import MessagesRequest
from asyncspec_nodes.plugins.dialects.anthropic_answers import NAMES
from asyncspec_nodes.serving.templates import ChatFacts
from asyncspec_protocol.limits import Token
from asyncspec_protocol.messages import Submit


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    """The body of ``POST /tokenize``."""

    model: str | None = None
    prompt: str | None = None
    # llama.cpp's name for it.
    content: str | None = None
    # Whether a prompt gets the tokenizer's own beginning and end; llama.cpp's name for it.
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    messages: tuple[ChatMessage, ...] | None = None
    tools: tuple[ToolSpec, ...] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        """Raises ``ApiError``."""
        if (self._text is None) == (self.messages is None):
            raise invalid("give either prompt or messages", "prompt")

    @property
    def _text(self) -> str | None:
        return self.content if self.prompt is None else self.prompt

    def submit(self, context: RequestContext) -> Submit:
        """Raises ``ApiError``."""
        if self.messages is not None:
            names = ("continue_final_message", "add_generation_prompt", "chat_template_kwargs")
            options = {name: getattr(self, name) for name in names}
            chat = ChatRequest(messages=self.messages, tools=self.tools, **options)
            chat.check()
            return replace(chat.prepared(context), prompt_only=True)
        reading = _reading(prompt=self._text or "", tenant=context.tenant)
        return replace(reading, bare=False in (self.add_special_tokens, self.add_special))


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    """The body of ``POST /detokenize``."""

    model: str | None = None
    tokens: Annotated[tuple[Token, ...], Meta(min_length=1)]

    def check(self) -> None:
        """Nothing more."""

    def submit(self, context: RequestContext) -> Submit:
        """The same as a prompt."""
        return _reading(prompt_ids=self.tokens, tenant=context.tenant)


def _reading(*, prompt: str = "", prompt_ids: tuple[int, ...] = (), tenant: str) -> Submit:
    """A greedy request that computes nothing."""
    plain = Submit(0, prompt, 1, 0, 0.0, 0, 1.0)
    return replace(plain, prompt_ids=prompt_ids, tenant=tenant, prompt_only=True)


class CountRequest(MessagesRequest, frozen=True, kw_only=True):
    """The body of ``POST /v1/messages/count_tokens``: a request without the answer's settings."""

    def check(self) -> None:
        with renaming(NAMES):
            self.chat(ChatFacts()).check()
