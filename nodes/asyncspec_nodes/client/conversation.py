"""The requests of a conversation, each with the earlier messages."""

from __future__ import annotations

from msgspec.structs import replace

from asyncspec_nodes.serving.conversation import Message, encode
from asyncspec_protocol.messages import Submit


class Conversation:
    """``settings``: the requests' settings, without a prompt. ``chat``: the draft node renders the
    messages by the target's chat template; otherwise the prompt is the plain text so far, an empty
    line after each answer. ``system``: the system message, for ``chat`` only; empty: none."""

    def __init__(self, settings: Submit, *, chat: bool, system: str = "") -> None:
        self._settings = settings
        self._chat = chat
        self._messages = [Message("system", system)] if system else []
        self._text = ""

    def ask(self, turn: str) -> Submit:
        """The request of the next user turn."""
        if self._chat:
            self._messages.append(Message("user", turn))
            return replace(self._settings, chat=encode(self._messages))
        self._text += turn
        return replace(self._settings, prompt=self._text)

    def answered(self, text: str) -> None:
        """The answer to the last turn."""
        self._messages.append(Message("assistant", text))
        self._text += f"{text}\n\n"
