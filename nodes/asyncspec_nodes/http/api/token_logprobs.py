"""Log-probabilities of the tokens of an answer. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from asyncspec_protocol.messages import Output


class TokenLogprob(Struct, frozen=True):
    """A token's bytes and its log-probability (natural logarithm)."""

    spelled: bytes
    logprob: float

    @property
    def text(self) -> str:
        """Bytes that are not valid UTF-8 appear as escapes."""
        return self.spelled.decode(errors="backslashreplace")


class PositionLogprobs(Struct, frozen=True):
    """The token of one position, and the most likely tokens there, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


def position_logprobs(output: Output) -> Iterator[PositionLogprobs]:
    """Log-probabilities of every token of an ``Output`` that carries some."""
    count = len(output.token_log_probs)
    if not count:
        return
    width = len(output.top_tokens) // count
    top = tuple(map(TokenLogprob, output.token_bytes[count:], output.top_token_log_probs))
    for i, logprob in enumerate(output.token_log_probs):
        chosen = TokenLogprob(output.token_bytes[i], logprob)
        yield PositionLogprobs(chosen, top[i * width : (i + 1) * width])
