"""The tokens of a prompt in an answer, with their log-probabilities. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

from asyncspec_nodes.http.api.token_logprobs import TokenLogprob
from asyncspec_protocol.messages import Output, PromptLogprobs

Json = dict[str, object]


class PromptPosition(Struct, frozen=True):
    """A token of a prompt; without a log-probability where none is requested, and the first."""

    token: int
    spelled: bytes
    logprob: float | None = None
    # By probability among all tokens, from 1.
    rank: int = 0
    # The likeliest tokens there, best first.
    top: tuple[tuple[int, TokenLogprob], ...] = ()

    @property
    def text(self) -> str:
        """As of ``TokenLogprob``."""
        return TokenLogprob(self.spelled, 0.0).text

    def likeliest(self, count: int) -> dict[str, float] | None:
        """The ``count`` likeliest tokens and the prompt's own, as the API of completions has it."""
        if self.logprob is None:
            return None
        named = {token.text: token.logprob for _, token in self.top[:count]}
        return {**named, self.text: self.logprob}

    def ranked(self, count: int) -> Json | None:
        """The same as vLLM's ``prompt_logprobs`` has it."""
        if self.logprob is None:
            return None
        tokens = [(self.token, TokenLogprob(self.spelled, self.logprob), self.rank)]
        tokens += [(*best, rank) for rank, best in enumerate(self.top[:count], 1)]
        return {
            str(token): {"logprob": score.logprob, "rank": rank, "decoded_token": score.text}
            for token, score, rank in reversed(tokens)
        }


def prompt_positions(output: Output) -> Iterator[PromptPosition]:
    """Scores of an ``Output`` of the beginning of an answer with its prompt."""
    ids, spelled = output.prompt_ids, output.prompt_bytes
    scores = output.prompt_logprobs or PromptLogprobs((), ())
    unscored = len(ids) - len(scores.log_probs)
    for token, name in zip(ids[:unscored], spelled, strict=False):
        yield PromptPosition(token, name)
    count = len(scores.top_tokens) // max(1, len(scores.log_probs))
    named = map(TokenLogprob, spelled[len(ids) :], scores.top_log_probs)
    top = tuple(zip(scores.top_tokens, named, strict=True))
    for i, log_prob in enumerate(scores.log_probs):
        place = unscored + i
        best = top[i * count : (i + 1) * count]
        yield PromptPosition(ids[place], spelled[place], log_prob, scores.ranks[i], best)


def ranked(prompt: Sequence[PromptPosition], count: int) -> list[Json | None]:
    """``prompt_logprobs`` of an answer, as vLLM has it."""
    return [position.ranked(count) for position in prompt]
