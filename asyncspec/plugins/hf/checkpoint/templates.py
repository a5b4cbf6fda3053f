"""Chat templates of checkpoints, in the process that writes conversations by them: as transformers
does it, which is imported here without torch and without the tokenizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from asyncspec.backend.chat_templates import ARGUMENT
from asyncspec.backend.template_worker import Render, Templates, renderer

_OF_USERS = {"add_generation_prompt", "continue_final_message", "documents", ARGUMENT}
"""Arguments of ``apply_chat_template`` that a request may set; others would decide what comes of
the text: padding to any length, tokens, tensors."""


class _Tokenizer(PreTrainedTokenizerBase):  # type: ignore[misc]
    """A tokenizer of which a template sees the names of its special tokens alone."""

    chat_template = None

    def __init__(self, tokens: dict[str, str]) -> None:
        self.__dict__["tokens"] = tokens

    @property
    def special_tokens_map(self) -> dict[str, str]:
        return dict(self.tokens)


def make(argument: bytes) -> Callable[[bytes], bytes]:
    """See ``template_worker.renderer``."""
    takes = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    return renderer(argument, _with_tokens, frozenset(takes.keys() - _OF_USERS))


def _with_tokens(templates: Templates) -> Render:
    tokenizer = _Tokenizer(templates.tokens)

    def render(
        template: str,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        options: dict[str, Any],
    ) -> str:
        text: str = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=template,
            tokenize=False,
            **{"add_generation_prompt": True, **options},
        )
        return text

    return render
