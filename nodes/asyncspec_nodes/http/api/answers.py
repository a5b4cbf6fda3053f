"""The context and the answers of a request, whatever its endpoint. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf

from msgspec import Struct

from asyncspec_nodes.http.api.prompt_scores import PromptPosition, prompt_positions
from asyncspec_nodes.http.api.token_logprobs import PositionLogprobs, position_logprobs
from asyncspec_nodes.serving.templates import ChatFacts
from asyncspec_protocol.messages import Finished, Output, Submit

Note = Callable[[Sequence[str]], None]
"""Told what is left out of a request."""


class RequestContext(Struct, frozen=True):
    """Facts of a request that are not in its body."""

    # For a request without one; part of the response, so that it can be reproduced.
    seed: int = 0
    # As in ``Submit.tenant``.
    tenant: str = ""
    # The served model's public name.
    model: str = ""
    # A unique id of the response, and seconds since the epoch.
    id: str = ""
    created: int = 0
    # What the target's chat template can do.
    facts: ChatFacts = ChatFacts()
    note: Note = lambda names: None


TOKEN_BYTES = 4
"""Bytes of a token of text in UTF-8, about."""


def expected_tokens(submit: Submit) -> int:
    """Tokens of a prompt, before it is read: exact for tokens, about for text."""
    text = submit.chat or submit.prompt
    return len(submit.prompt_ids) or -(-len(text.encode()) // TOKEN_BYTES)


class ChoiceBuffer:
    """One answer: its unwritten output, and its end. ``expected``: tokens of its prompt, about."""

    def __init__(self, expected: int = 0) -> None:
        self._text: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[PositionLogprobs] = []
        # The prompt, where the answer begins with it.
        self.prompt: list[PromptPosition] = []
        # Where the text of each token begins, in characters of all of the answer's text.
        self.starts: list[int] = []
        self._characters = 0
        # Tokens of the prompt, and of these those from the prefix cache, once they are known.
        self.prompt_tokens = self.shared_tokens = 0
        # Tokens of the prompt that stages have, until that is written.
        self.prompt_read = 0
        # Tokens of the answer so far.
        self.new_tokens = 0
        # Characters of written tokens with log-probabilities.
        self.offset = 0
        self.end: Finished | None = None
        # Tokens that it has taken: also of its prompt, as expected until its end says it.
        self.used = self._prompt = expected

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def prompt_complete(self) -> bool:
        """Whether all of ``prompt`` is there, as something behind it is."""
        return bool(self.tokens) or self.end is not None

    @property
    def mean_logprob(self) -> float:
        """Mean of its tokens, natural logarithm, where they have log-probabilities and nothing of
        them was written; the least number for none."""
        count = len(self.logprobs)
        return sum(one.chosen.logprob for one in self.logprobs) / count if count else -inf

    def add(self, event: Output | Finished) -> None:
        if isinstance(event, Finished):
            self.end = event
            self.prompt_tokens = int(event.stats.get("prompt_tokens", 0))
            self.shared_tokens = int(event.stats.get("shared_tokens", 0))
            # An error without a session: nothing was computed.
            free = event.reason == "error" and not event.stats.get("sessions")
            self._read(0 if free else int(event.stats.get("prompt_tokens", 0)))
            return
        self.used += len(event.token_ids)
        self.new_tokens += len(event.token_ids)
        self._text.append(event.text)
        self._start(event)
        if event.prompt_tokens and not self.prompt_tokens:
            self.prompt_tokens, self.shared_tokens = event.prompt_tokens, event.shared_tokens
        self.prompt_read = event.prompt_read
        self.tokens.extend(event.token_ids)
        self.logprobs.extend(position_logprobs(event))
        self.prompt.extend(prompt_positions(event))

    def _start(self, output: Output) -> None:
        """Note where tokens begin: evenly in the text where their lengths are not told."""
        count, length = len(output.token_ids), len(output.text)
        lengths = output.text_lengths
        places = accumulate(lengths) if lengths else (length * i // count for i in range(1, count))
        self.starts += [self._characters + place for place in (0, *places)][:count]
        self._characters += length

    def fail(self) -> None:
        """The service cannot answer: the prompt is not counted."""
        self._read(0)

    def _read(self, tokens: int) -> None:
        """So many tokens of the prompt were read."""
        self.used += tokens - self._prompt
        self._prompt = tokens

    def clear(self) -> None:
        """The output is written."""
        if self.prompt_complete:
            self.offset += sum(len(position.text) for position in self.prompt)
            self.prompt = []
        self.offset += sum(len(one.chosen.text) for one in self.logprobs)
        self._text, self.tokens, self.logprobs = [], [], []
