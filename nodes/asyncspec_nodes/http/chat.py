"""Chat completions: their request, and how their answers are written. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from asyncspec_nodes.http.errors import invalid
from asyncspec_nodes.http.form import Asked, Choice
from asyncspec_nodes.http.logprobs import Step, chat_form
from asyncspec_nodes.http.messages import ChatMessage, conversation
from asyncspec_nodes.http.parameters import MOST_TOKENS, Count, Shared, Tops


class ChatRequest(Shared, frozen=True, kw_only=True):
    """The body of ``POST /v1/chat/completions``."""

    messages: tuple[ChatMessage, ...]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Tops | None = None

    def check(self) -> None:
        """See ``Shared``."""
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs is given without logprobs: true", "top_logprobs")
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise invalid("max_tokens and max_completion_tokens differ", "max_completion_tokens")

    @property
    def limit(self) -> int | None:
        """See ``Shared``."""
        return self.max_completion_tokens or self.max_tokens

    def asked(self, seed: int) -> Asked:
        """What is asked of the cluster. ``seed``: in place of one that is not given."""
        seed = seed if self.seed is None else self.seed
        chat = conversation(self.messages)
        # Without a limit an answer may take what room the context has.
        most = self.limit or MOST_TOKENS
        submits = tuple(
            replace(
                self.submit(most, seed, choice),
                chat=chat,
                log_probs=bool(self.logprobs),
                tops=self.top_logprobs or 0,
            )
            for choice in range(self.choices)
        )
        return Asked(
            ChatForm(logprobs=bool(self.logprobs)),
            submits,
            self.choices,
            seed,
            bool(self.stream),
            self.include_usage,
            bool(self.return_details),
        )


class ChatForm:
    """See ``Form``."""

    whole_name = "chat.completion"
    piece_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"
    prompt_name = "messages"

    def __init__(self, *, logprobs: bool) -> None:
        self._logprobs = logprobs

    def first(self) -> Choice | None:
        """See ``Form``."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return {"delta": delta, "logprobs": None}

    def piece(self, text: str, said: list[Step], offset: int) -> Choice:
        """See ``Form``."""
        return {"delta": {"content": text}, "logprobs": self._said(said)}

    def last(self) -> Choice:
        """See ``Form``."""
        return {"delta": {}, "logprobs": None}

    def whole(self, text: str, said: list[Step]) -> Choice:
        """See ``Form``."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message, "logprobs": self._said(said)}

    def _said(self, said: list[Step]) -> dict[str, object] | None:
        return chat_form(said) if self._logprobs else None
