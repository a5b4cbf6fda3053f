"""The table after a run: what the answer cost."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from asyncspec_nodes.client.answers import Answer

_UNITS = ("B", "kB", "MB", "GB")


def print_summary(answers: Sequence[Answer], stages: int, guarantee: str) -> None:
    """One table on stderr; of many answers the sums."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    for name, value in rows(answers, stages, guarantee):
        table.add_row(name, value)
    console = Console(stderr=True)
    console.print()
    console.print(table)


def rows(answers: Sequence[Answer], stages: int, guarantee: str) -> list[tuple[str, str]]:
    """Names and values, in the order of the table."""

    def total(name: str) -> float:
        return sum(answer.stats.get(name, 0.0) for answer in answers)

    # Rates count the tokens after the first: prompt processing brings that one.
    decoded = sum(max(0.0, answer.stats.get("new_tokens", 0.0) - 1) for answer in answers)
    hits = sum(a.stats.get("hit_rate", 0.0) * a.stats.get("new_tokens", 0.0) for a in answers)
    policies = sorted({answer.submit.policy for answer in answers if answer.submit.policy})
    lines = [
        ("tokens", f"{total('new_tokens'):.0f}"),
        ("prompt tokens", f"{total('prompt_tokens'):.0f}"),
        ("tokens/s", _ratio(decoded, total("decode_seconds"))),
        ("rounds", f"{total('rounds'):.0f}"),
        ("tokens per round", _ratio(decoded, total("rounds"))),
        ("tokens per pipeline pass", _ratio(decoded, total("turns"))),
        ("hit rate", f"{hits / max(1.0, total('new_tokens')):.0%}"),
        ("wasted rows", f"{total('wasted_rows'):.0f} of {total('rows'):.0f}"),
        ("bytes sent", _bytes(total("bytes_sent"))),
        ("policy", ", ".join(policies) or "the cluster's"),
        ("stages", str(stages)),
    ]
    guarantees = sorted({guarantee_of(answer, guarantee) for answer in answers} - {""})
    if guarantees:
        lines.append(("guarantee", ", ".join(guarantees)))
    return lines


def guarantee_of(answer: Answer, stages: str) -> str:
    """What the stages vouch for ("bitwise", "tolerance"), unless the policy is lossy."""
    return "none: a lossy policy" if answer.stats.get("lossy") else stages


def _ratio(numerator: float, denominator: float) -> str:
    return f"{numerator / denominator:.2f}" if denominator else "-"


def _bytes(count: float) -> str:
    for unit in _UNITS[:-1]:
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} {_UNITS[-1]}"
