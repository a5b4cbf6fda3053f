"""Chat templates in a process of their own: they are strangers' programs, as grammars are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from asyncspec.backend.chat_templates import ARGUMENT, chosen
from asyncspec.backend.tokenizer import conversation
from asyncspec.constraint.worker import BoundError, Limits, Worker
from asyncspec.core.errors import first_line

LIMITS = Limits(seconds=2.0, mebibytes=512)
"""What one conversation's text may take. The longest one that is read, 4 MB, takes a fifth."""

MAX_BYTES = 16 * 1024 * 1024
"""Length of the text, UTF-8: four times the longest conversation."""


class Templates(Struct, frozen=True):
    """What a renderer is made of: a tokenizer's templates, and its tokens by the names that
    templates use, such as ``eos_token``."""

    by_name: dict[str, str]
    tokens: dict[str, str]


Render = Callable[[str, list[dict[str, Any]], list[Any] | None, dict[str, Any]], str]
"""The text of a template, messages, tools and further arguments."""


def renderer(
    argument: bytes, render: Callable[[Templates], Render], reserved: frozenset[str]
) -> Callable[[bytes], bytes]:
    """What a ``Worker`` makes of ``Templates`` in msgpack: it writes a ``conversation``, none of
    whose arguments is ``reserved``. It raises ``ValueError`` where the template refuses one, and
    ``BoundError`` where it writes too much."""
    templates = msgspec.msgpack.decode(argument, type=Templates)
    write = render(templates)

    def written(chat: bytes) -> bytes:
        messages, tools, options = conversation(chat.decode(errors="surrogatepass"), reserved)
        name = options.pop(ARGUMENT, None)
        template = chosen(templates.by_name, name, tools=bool(tools))
        try:
            text = write(template, messages, tools, options).encode()
        except (MemoryError, RecursionError):
            raise
        except Exception as error:  # templates are programs and may fail in any way
            why = first_line(error)
            raise ValueError(f"the chat template refuses these messages: {why}") from error
        if len(text) > MAX_BYTES:
            raise BoundError(f"it writes {len(text)} bytes; at most {MAX_BYTES} are read")
        return text

    return written


class TemplateWorker:
    """Writes conversations by a tokenizer's templates. Thread-safe. ``make``: see ``Setup.make``;
    it returns a ``renderer``."""

    def __init__(self, make: str, by_name: Mapping[str, str], tokens: Mapping[str, str]) -> None:
        templates = Templates(dict(by_name), dict(tokens))
        self._worker = Worker(make, lambda: msgspec.msgpack.encode(templates), LIMITS)

    def __call__(self, chat: str) -> str:
        """The prompt. Raises ``ValueError`` with a sentence for users; ``BoundError`` where the
        template takes too much."""
        try:
            return self._worker(chat.encode(errors="surrogatepass")).decode()
        except BoundError as error:
            raise BoundError(f"the chat template cannot be used: {error}") from None

    def close(self) -> None:
        """End the process."""
        self._worker.close()
