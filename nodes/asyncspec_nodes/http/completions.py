"""Text completions: their request, and how their answers are written. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from asyncspec_nodes.http.errors import invalid
from asyncspec_nodes.http.form import Asked, Choice
from asyncspec_nodes.http.logprobs import Step, text_form
from asyncspec_nodes.http.parameters import MOST_CHOICES, MOST_TOKENS, Shared, Tops
from asyncspec_protocol.messages import Submit

DEFAULT_TOKENS = 16
"""The API's own."""

Prompt = str | tuple[int, ...]


class CompletionRequest(Shared, frozen=True, kw_only=True):
    """The body of ``POST /v1/completions``."""

    # Text, tokens, or a list of either.
    prompt: object
    logprobs: Tops | None = None

    def asked(self, seed: int) -> Asked:
        """What is asked of the cluster. ``seed``: in place of one that is not given."""
        seed = seed if self.seed is None else self.seed
        prompts = _prompts(self.prompt)
        if len(prompts) * self.choices > MOST_CHOICES:
            raise invalid(f"more than {MOST_CHOICES} answers are asked for", "prompt")
        submits = tuple(
            self._submit(prompt, seed, choice)
            for prompt in prompts
            for choice in range(self.choices)
        )
        return Asked(
            TextForm(logprobs=self.logprobs is not None),
            submits,
            self.choices,
            seed,
            bool(self.stream),
            self.include_usage,
            bool(self.return_details),
        )

    def _submit(self, prompt: Prompt, seed: int, choice: int) -> Submit:
        text = isinstance(prompt, str)
        return replace(
            self.submit(self.limit or DEFAULT_TOKENS, seed, choice),
            prompt=prompt if text else "",
            prompt_ids=() if text else prompt,
            log_probs=self.logprobs is not None,
            tops=self.logprobs or 0,
        )


def _prompts(given: object) -> tuple[Prompt, ...]:
    """Raises ``ApiError`` for what is no prompt."""
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, list) or not given:
        raise invalid("prompt: expected text, tokens, or a list of either", "prompt")
    if isinstance(given[0], int):
        return (_tokens(given),)
    return tuple(one if isinstance(one, str) else _tokens(one) for one in given)


def _tokens(given: object) -> tuple[int, ...]:
    if not isinstance(given, list) or not given:
        raise invalid("prompt: expected text, tokens, or a list of either", "prompt")
    for token in given:
        if type(token) is not int or not 0 <= token <= MOST_TOKENS:
            raise invalid("prompt: a token is a number that is not below 0", "prompt")
    return tuple(given)


class TextForm:
    """See ``Form``."""

    whole_name = "text_completion"
    piece_name = "text_completion"
    id_prefix = "cmpl-"
    prompt_name = "prompt"

    def __init__(self, *, logprobs: bool) -> None:
        self._logprobs = logprobs

    def first(self) -> Choice | None:
        """See ``Form``."""
        return None

    def piece(self, text: str, said: list[Step], offset: int) -> Choice:
        """See ``Form``."""
        return {"text": text, "logprobs": text_form(said, offset) if self._logprobs else None}

    def last(self) -> Choice:
        """See ``Form``."""
        return {"text": "", "logprobs": None}

    def whole(self, text: str, said: list[Step]) -> Choice:
        """See ``Form``."""
        return self.piece(text, said, 0)
