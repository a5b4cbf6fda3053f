"""From answers to ratios. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from msgspec import Struct

from tools.bench.peers.peer import Answer

Repeats = Sequence[Sequence[Answer]]
"""A peer's answers: for every repeat, one to each prompt."""


class Standing(Struct, frozen=True):
    """One peer against the base. Each ratio is within one repeat, in which they took turns."""

    name: str
    # Its quota; None: none is known.
    cores: float | None
    # To the base's tokens a second: median, least and most over the repeats.
    ratio: float
    least: float
    most: float
    # Median over the repeats.
    tokens_per_second: float


def rate(answers: Sequence[Answer]) -> float:
    """Tokens a second over some whole answers."""
    return sum(a.count for a in answers) / sum(a.seconds for a in answers)


def standings(
    found: Mapping[str, Repeats], cores: Mapping[str, float | None], base: str
) -> list[Standing]:
    """Every peer, the fastest first."""
    bases = [rate(answers) for answers in found[base]]
    each = []
    for name, repeats in found.items():
        rates = [rate(answers) for answers in repeats]
        ratios = [one / other for one, other in zip(rates, bases, strict=True)]
        each.append(
            Standing(
                name,
                cores[name],
                statistics.median(ratios),
                min(ratios),
                max(ratios),
                statistics.median(rates),
            )
        )
    return sorted(each, key=lambda standing: -standing.ratio)


def differs(answer: Answer, reference: Answer) -> bool:
    """Whether one of both texts is no beginning of the other: engines may stop earlier, and not
    every one tells its token ids."""
    if answer.token_ids:
        return _part(answer.token_ids, reference.token_ids)
    return _part(answer.text, reference.text)


def _part(one: Sequence[object], other: Sequence[object]) -> bool:
    shorter = min(len(one), len(other))
    return one[:shorter] != other[:shorter]
