"""The table: medians over the repeats, and ratios within each of them. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from asyncspec.core.errors import ClusterError
from tools.bench.first_token.readers import LIKELY, FirstToken
from tools.bench.first_token.setting import Entry, Setting

OPTIONAL = (
    "links",
    "link_share",
    "fill_bound",
    "processor_seconds",
    "others_seconds",
    "beside",
)
"""Columns that are left out where no row has anything there."""


class Row(Struct, frozen=True):
    """One reader with prompts of one length: medians over the repeats."""

    target: str
    dtype: str
    mode: str
    tokens: int
    reader: str
    links: str
    threads: int
    first_token_seconds: float
    prompt_per_second: float
    # Of prompt tokens a second, to those of the engine alone with as many threads within one
    # repeat, or on paced stages to the fill bound: median, least, most.
    ratio: float
    least: float
    most: float
    # Of the same repeats: how often its first token was that of the engine alone.
    same_token: int
    repeats: int
    # How much likelier the engine alone takes its own first token for than that of the reader, by
    # the difference of logits: the largest of the repeats.
    logit_gap: float
    peak_mib: float
    # Of the time to the first token, for which a link must carry hidden states.
    link_share: float = 0.0
    # Seconds that paced stages need at least.
    fill_bound: float = 0.0
    # Of processors during a read: median of its own processes, most of all others.
    processor_seconds: float = 0.0
    others_seconds: float = 0.0
    # P95 of the seconds between a stream's tokens beside a prompt over that without.
    beside: float = 0.0


def rows(
    setting: Setting,
    tokens: int,
    answers: Mapping[Entry, Sequence[FirstToken]],
    peak_mib: Mapping[Entry, float],
    held_up: Mapping[Entry, float],
) -> Iterator[Row]:
    """The rows of prompts of so many tokens. Raises ``ClusterError`` where a reader has another
    first token than rounding explains."""
    for entry, read in answers.items():
        if setting.stage_seconds and not entry.pipeline:
            continue  # it keeps no pace
        threads = setting.threads(entry)
        alone = answers[Entry("alone", threads)]
        name, bound = setting.name(entry), 0.0
        if setting.stage_seconds:
            bound = setting.fill_bound(entry.count, tokens)
        pairs = list(zip(alone, read, strict=True))
        gaps = [_logit_gap(name, *pair) for pair in pairs]
        ratios = [(bound or base.seconds) / answer.seconds for base, answer in pairs]
        seconds = statistics.median(answer.seconds for answer in read)
        carried = setting.link_seconds(tokens, entry.mbit) if entry.mbit else 0.0
        yield Row(
            target=setting.target.name,
            dtype=setting.dtype,
            mode=setting.mode,
            tokens=tokens,
            reader=name,
            links=f"{entry.mbit:g} Mbit/s" if entry.mbit else "",
            threads=threads,
            first_token_seconds=round(seconds, 3),
            prompt_per_second=round(tokens / seconds, 1),
            ratio=round(statistics.median(ratios), 3),
            least=round(min(ratios), 3),
            most=round(max(ratios), 3),
            same_token=sum(base.token == answer.token for base, answer in pairs),
            repeats=len(pairs),
            logit_gap=round(max(gaps), 3),
            peak_mib=round(peak_mib[entry]),
            link_share=round(carried / seconds, 3),
            fill_bound=round(bound, 3),
            processor_seconds=round(statistics.median(x.processor_seconds for x in read), 3),
            others_seconds=round(max(x.others_seconds for x in read), 3),
            beside=round(held_up.get(entry, 0.0), 2),
        )


def _logit_gap(name: str, base: FirstToken, answer: FirstToken) -> float:
    if answer.token not in base.gaps:
        raise ClusterError(
            f"{name}: the first token {answer.token} is none of the {LIKELY} that the engine alone "
            f"takes for the likeliest ({', '.join(map(str, base.gaps))})"
        )
    return base.gaps[answer.token]


def shown(table: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows for printing, without columns in which nothing was measured."""
    empty = {name for name in OPTIONAL if not any(getattr(row, name) for row in table)}
    printed: list[dict[str, Any]] = [msgspec.to_builtins(row) for row in table]
    return [{name: row[name] for name in row if name not in empty} for row in printed]
