"""Log-probabilities in the API's two forms. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from asyncspec_protocol.messages import Output


class Place(Struct, frozen=True):
    """A token and its log-probability."""

    spelled: bytes
    log_prob: float

    @property
    def text(self) -> str:
        """Bytes that are no character of their own are written as such."""
        return self.spelled.decode(errors="backslashreplace")

    def entry(self) -> dict[str, object]:
        """In the chat form."""
        return {"token": self.text, "logprob": self.log_prob, "bytes": list(self.spelled)}


class Step(Struct, frozen=True):
    """One token of an answer, and the likeliest in its place, best first."""

    chosen: Place
    likely: tuple[Place, ...]


def steps(output: Output) -> Iterator[Step]:
    """Of every token of a piece, where log-probabilities were asked for."""
    count = len(output.log_probs)
    if not count:
        return
    tops = len(output.likely) // count
    likely = tuple(map(Place, output.spelled[count:], output.likely_log_probs))
    for i, log_prob in enumerate(output.log_probs):
        yield Step(Place(output.spelled[i], log_prob), likely[i * tops : (i + 1) * tops])


def chat_form(said: list[Step]) -> dict[str, object]:
    """``choices[].logprobs`` of a chat completion."""
    content = [
        {**step.chosen.entry(), "top_logprobs": [place.entry() for place in step.likely]}
        for step in said
    ]
    return {"content": content, "refusal": None}


def text_form(said: list[Step], offset: int) -> dict[str, object]:
    """``choices[].logprobs`` of a text completion. ``offset``: characters before the first."""
    offsets = []
    for step in said:
        offsets.append(offset)
        offset += len(step.chosen.text)
    return {
        "tokens": [step.chosen.text for step in said],
        "token_logprobs": [step.chosen.log_prob for step in said],
        # With the chosen token, as the API has it.
        "top_logprobs": [
            {place.text: place.log_prob for place in (*step.likely, step.chosen)} for step in said
        ],
        "text_offset": offsets,
    }


def width(said: list[Step]) -> int:
    """Characters of some tokens, as ``text_offset`` counts them."""
    return sum(len(step.chosen.text) for step in said)
