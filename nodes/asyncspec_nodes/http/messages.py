"""The messages of a conversation, as the API has them and as chat templates want them. Pure."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from asyncspec_nodes.http.errors import invalid
from asyncspec_nodes.serving.conversation import Message, encode


class Part(Struct, frozen=True):
    """A part of a message's content; only text is served."""

    type: str
    text: str | None = None


class ChatMessage(Struct, frozen=True):
    """One message. What else clients send along (``refusal``, ``annotations``) is looked at only
    where it would change the prompt."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | tuple[Part, ...] | None = None
    name: str | None = None
    tool_calls: object = None
    function_call: object = None
    audio: object = None


def conversation(messages: tuple[ChatMessage, ...]) -> str:
    """As ``Submit.chat`` has it: JSON with role and content alone. Raises ``ApiError``."""
    if not messages:
        raise invalid("messages is empty; give at least one", "messages")
    return encode([_plain(message, f"messages[{i}]") for i, message in enumerate(messages)])


def _plain(message: ChatMessage, where: str) -> Message:
    if message.role in ("tool", "function"):
        raise _unsupported(f"{where}.role", f"the role {message.role}")
    for field in ("tool_calls", "function_call", "audio"):
        if getattr(message, field):
            raise _unsupported(f"{where}.{field}", field)
    role = "system" if message.role == "developer" else message.role
    return Message(role, _text(message.content, f"{where}.content"))


def _text(content: str | tuple[Part, ...] | None, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise invalid(f"{where} is missing; give some text", where)
    texts = []
    for i, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise _unsupported(f"{where}[{i}]", f"content of type {part.type!r}")
        texts.append(part.text)
    return "".join(texts)


def _unsupported(where: str, what: str) -> Exception:
    return invalid(f"{what} is not supported by this service", where, "unsupported_value")
