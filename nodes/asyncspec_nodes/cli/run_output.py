"""The table after a run: what the answer cost."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

import msgspec
from rich.console import Console
from rich.table import Table

from asyncspec_nodes.client.answers import Answer
from asyncspec_nodes.reference.check import Comparison

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


# --- What ``asyncspec run`` prints: text as it comes and a summary, or JSON and nothing else.


class Printer(Protocol):
    """The ways to print."""

    def begin(self, stages: int, guarantee: str) -> None:
        """A cluster is there. ``guarantee``: as its stages vouch for it, "" where nobody says."""

    def show(self, text: str) -> None:
        """Text as it comes."""

    def done(self, answer: Answer) -> None:
        """A whole answer, in the order of the prompts."""

    def stop(self) -> None:
        """Nothing more comes, for whatever reason."""

    def end(self, answers: Sequence[Answer], checks: Sequence[Comparison]) -> None:
        """Everything is there."""


class TextPrinter:
    """For people: the text on stdout, the rest on stderr."""

    def __init__(self, *, many: bool) -> None:
        self._many = many
        self._shown = False
        self._stages, self._guarantee = 0, ""

    def begin(self, stages: int, guarantee: str) -> None:
        """See ``Printer``."""
        self._stages, self._guarantee = stages, guarantee

    def show(self, text: str) -> None:
        """See ``Printer``. Of many prompts each answer is printed as a whole."""
        if not self._many:
            self._shown = True
            _write(text)

    def done(self, answer: Answer) -> None:
        """See ``Printer``."""
        if self._many:
            turn = f".{answer.turn + 1}" if answer.turn else ""
            text = f"error: {answer.error}" if answer.error else answer.text
            _write(f"[{answer.index + 1}{turn}] {text}\n")

    def stop(self) -> None:
        """See ``Printer``. What follows begins on a line of its own."""
        if self._shown:
            self._shown = False
            _write("\n")

    def end(self, answers: Sequence[Answer], checks: Sequence[Comparison]) -> None:
        """See ``Printer``."""
        fine = [answer for answer in answers if answer.error is None]
        if fine:
            print_summary(fine, self._stages, self._guarantee)
        for comparison in checks:
            sys.stderr.write(f"{comparison.sentence}\n")


class JsonPrinter:
    """For programs: an object, or for a list of prompts an object a line as soon as it is done;
    where answers are ``checked``, when they are."""

    def __init__(self, *, many: bool, checked: bool) -> None:
        # A single answer that fails is an error and no object.
        self._at_once = many and not checked
        self._stages, self._guarantee = 0, ""

    def begin(self, stages: int, guarantee: str) -> None:
        """See ``Printer``."""
        self._stages, self._guarantee = stages, guarantee

    def show(self, text: str) -> None:
        """See ``Printer``."""

    def done(self, answer: Answer) -> None:
        """See ``Printer``."""
        if self._at_once:
            self._print(answer, {})

    def stop(self) -> None:
        """See ``Printer``."""

    def end(self, answers: Sequence[Answer], checks: Sequence[Comparison]) -> None:
        """See ``Printer``."""
        if self._at_once:
            return
        for i, answer in enumerate(answers):
            self._print(answer, {"check": checks[i]} if checks else {})

    def _print(self, answer: Answer, more: dict[str, Comparison]) -> None:
        fields = as_dict(answer, self._stages, self._guarantee) | more
        _write(msgspec.json.encode(fields).decode() + "\n")


def as_dict(answer: Answer, stages: int, guarantee: str) -> dict[str, object]:
    """The JSON object of an answer; other programs read it."""
    fields: dict[str, object] = {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "chat": bool(answer.submit.chat),
        "policy": answer.submit.policy,
        "stages": stages,
        "stats": {name: number(name, value) for name, value in answer.stats.items()},
        "guarantee": guarantee_of(answer, guarantee),
        "index": answer.index,
        "turn": answer.turn,
    }
    if answer.id is not None:
        fields["id"] = answer.id
    if answer.error is not None:
        fields["error"] = str(answer.error)
    return fields


def number(name: str, value: float) -> float:
    """Counts as integers; what is measured or divided stays a float."""
    measured = name.endswith(("seconds", "_rate")) or "_per_" in name
    return value if measured or not value.is_integer() else int(value)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
