"""What a tokenizer provides, and the conversations that it renders."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec
from msgspec import Struct


def conversation(
    chat: str, reserved: Collection[str] = ()
) -> tuple[list[dict[str, Any]], list[Any] | None, dict[str, Any]]:
    """Parse ``Submit.chat`` into messages, tools (None: none) and further arguments of the
    template. Raises ``ValueError`` for anything else, and for an argument that is ``reserved``."""
    try:
        document = json.loads(chat)
        if isinstance(document, list):
            document = {"messages": document, "tools": None, "options": {}}
        parsed = msgspec.convert(document, _Conversation)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the conversation is none: {error}") from None
    for name in sorted(parsed.options.keys() & reserved):
        raise ValueError(f"{name} is not an argument of chat templates; leave it out")
    return parsed.messages, parsed.tools or None, parsed.options


class _Conversation(Struct):
    messages: list[dict[str, Any]]
    tools: list[Any] | None
    options: dict[str, Any]


class Tokenizer(Protocol):
    """A target's tokenizer."""

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template."""

    @property
    def decodes_as_whole(self) -> bool:
        """Whether later tokens may change the text of earlier ones at any distance."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of a prompt, without chat template."""

    @property
    def template(self) -> str:
        """The chat template, Jinja; empty where there is none."""

    def render(self, chat: str) -> tuple[int, ...]:
        """Tokens of a ``conversation``. Raises ``ValueError`` with a sentence for users."""

    def prompt(self, chat: str) -> str:
        """The text that ``render`` reads."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones left out."""

    def spell(self, token: int) -> bytes:
        """The bytes of a token; of a special one its name."""

    def is_special(self, token: int) -> bool:
        """Whether it is a special token, which ``decode`` skips."""

    def is_byte(self, token: int) -> bool:
        """Whether it is a single raw byte."""

    def close(self) -> None:
        """End the process that writes conversations, if there is one."""


@runtime_checkable
class BareTokenizer(Protocol):
    """A ``Tokenizer`` that begins or ends texts with tokens of its own."""

    def encode_bare(self, text: str) -> tuple[int, ...]:
        """Tokens of a text without those."""
