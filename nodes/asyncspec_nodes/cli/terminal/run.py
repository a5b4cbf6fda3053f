"""What ``asyncspec run`` prints: text as it comes and a summary, or JSON and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import zip_longest

import msgspec
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from asyncspec.policy.flow.policy import describe
from asyncspec_nodes.client.answers import Answer
from asyncspec_nodes.reference.check import Comparison
from asyncspec_protocol.sampling import MAX_INT


class Printer:
    """Prints the answers of a run. For people: text on stdout as it comes, the rest on stderr; of a
    list of prompts (``many``) each answer as a whole. With ``json``: an object, or for a list an
    object a line as soon as its answer is done; where answers are ``checked``, when they are."""

    def __init__(self, *, many: bool, json: bool, checked: bool) -> None:
        self._many = many
        self._json = json
        # A single answer that fails is an error and no object.
        self._at_once = many and not (json and checked)
        self._stages, self._guarantee, self._draft = 0, "", ""
        self._shown = False

    def begin(self, stages: int, guarantee: str, draft: str = "") -> None:
        """The cluster serves. ``guarantee``: of its stages; ``draft``: its token source, and why;
        empty: unknown."""
        self._stages, self._guarantee, self._draft = stages, guarantee, draft

    def show(self, text: str) -> None:
        if not self._many and not self._json:
            self._shown = True
            _write(text)

    def done(self, answer: Answer) -> None:
        """A whole answer, in the order of the prompts."""
        if not self._at_once:
            return
        if self._json:
            self._print_object(answer)
            return
        turn = f".{answer.turn + 1}" if answer.turn else ""
        text = f"error: {answer.error}" if answer.error else answer.text
        _write(f"[{answer.index + 1}{turn}] {text}\n")

    def stop(self) -> None:
        """Nothing more comes, for whatever reason."""
        if self._shown:
            _write("\n")

    def end(self, answers: Sequence[Answer], checks: Sequence[Comparison]) -> None:
        """Everything has come."""
        if self._json:
            if not self._at_once:
                for answer, check in zip_longest(answers, checks):
                    self._print_object(answer, check)
            return
        fine = [
            answer
            for answer in answers
            if answer.error is None and (answer.token_ids or answer.finish_reason != "cancelled")
        ]
        if fine:
            console = Console(stderr=True)
            console.print()
            console.print(summary(fine, self._stages, self._guarantee, self._draft))
        for comparison in checks:
            sys.stderr.write("".join(f"{line}\n" for line in comparison.lines))

    def _print_object(self, answer: Answer, check: Comparison | None = None) -> None:
        fields = as_dict(answer, self._stages, self._guarantee, self._draft)
        _write(msgspec.json.encode(fields | ({"check": check} if check else {})).decode() + "\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def summary(answers: Sequence[Answer], stages: int, guarantee: str, draft: str = "") -> Table:
    """What the answers cost, as sums."""

    def total(name: str) -> float:
        return sum(answer.stats.get(name, 0.0) for answer in answers)

    def per(name: str) -> str:
        # Rates count the tokens after the first, which comes from processing the prompt.
        decoded = sum(max(0.0, answer.stats.get("new_tokens", 0.0) - 1) for answer in answers)
        return f"{decoded / total(name):.2f}" if total(name) else "-"

    hits = sum(a.stats.get("hit_rate", 0.0) * a.stats.get("new_tokens", 0.0) for a in answers)
    policies = sorted({answer.submit.policy for answer in answers if answer.submit.policy})
    guarantees = sorted({guarantee_of(answer, guarantee) for answer in answers} - {""})
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    for name, value in (
        ("times plain decoding", times_plain(answers)),
        ("tokens/s", per("decode_seconds")),
        ("draft", draft),
        ("drafts by text", by_text(answers)),
        ("policy", ", ".join(policies) or "the cluster's"),
        ("guarantee", ", ".join(guarantees)),
        ("tokens", f"{total('new_tokens'):.0f}"),
        ("prompt tokens", f"{total('prompt_tokens'):.0f}"),
        ("prompt tokens/s", prompt_rate(answers)),
        ("rounds", f"{total('rounds'):.0f}"),
        ("tokens per round", per("rounds")),
        ("tokens per pipeline pass", per("turns")),
        ("hit rate", f"{hits / max(1.0, total('new_tokens')):.0%}"),
        ("wasted rows", f"{total('wasted_rows'):.0f} of {total('rows'):.0f}"),
        ("bytes sent", decimal(int(total("bytes_sent")))),
        ("stages", str(stages)),
        ("speculation", speculation(answers)),
        ("processors", unlike_processors(answers)),
    ):
        if value:
            table.add_row(name, value)
    return table


def prompt_rate(answers: Sequence[Answer]) -> str:
    """Tokens of prompts read in a second, without those of the prefix cache; "" for none."""
    read = seconds = 0.0
    for stats in (answer.stats for answer in answers):
        seconds += (prompt_seconds := stats.get("prompt_seconds", 0.0))
        read += prompt_seconds * stats.get("prompt_per_second", 0.0)
    return f"{read / seconds:.1f}" if read else ""


def times_plain(answers: Sequence[Answer]) -> str:
    """How many times as fast as without speculation the answers came: about, where that was not
    measured but follows from the times of passes; "-" where nothing is known."""
    seconds = plain_seconds = 0.0
    measured = True
    for stats in (answer.stats for answer in answers):
        if rate := stats.get("times_plain_rate"):
            seconds += stats["decode_seconds"]
            plain_seconds += stats["decode_seconds"] * rate
            measured = measured and bool(stats.get("plain_measured"))
    if not seconds:
        return "-"
    times = plain_seconds / seconds
    return f"{times:.2f}" if measured else f"about {times:.1f}"


def speculation(answers: Sequence[Answer]) -> str:
    """How many of the answers' tokens were drafted before the target chose them, and what the
    policy had come to by the end."""
    hits = sum(answer.stats.get("hits", 0.0) for answer in answers)
    last = describe(answers[-1].stats)
    if not hits:
        return last
    tokens = hits + sum(answer.stats.get("misses", 0.0) for answer in answers)
    line = f"{hits:.0f} of {tokens:.0f} tokens were drafted ahead"
    return f"{line}; at the end {last}" if last else line


def by_text(answers: Sequence[Answer]) -> str:
    """How much of its own vocabulary a draft model with another one than the target's can use;
    nothing where it is the target's."""
    rate = answers[-1].stats.get("usable_drafts_rate")
    return "" if rate is None else f"{rate:.0%} of the draft's tokens can be used"


def unlike_processors(answers: Sequence[Answer]) -> str:
    """In how many answers layers came to another kind of processor, which may round otherwise;
    nothing where in none."""
    count = sum(bool(answer.stats.get("processor_changes")) for answer in answers)
    if not count:
        return ""
    return f"{count} answers went on where layers had moved to another kind: bits may differ there"


def guarantee_of(answer: Answer, stages: str) -> str:
    """The stages' guarantee ("bitwise", "tolerance"), unless the policy is lossy."""
    return "none: a lossy policy" if answer.stats.get("lossy") else stages


def as_dict(answer: Answer, stages: int, guarantee: str, draft: str = "") -> dict[str, object]:
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
    if draft:
        fields["draft"] = draft
    if answer.id is not None:
        fields["id"] = answer.id
    if answer.error is not None:
        fields["error"] = str(answer.error)
    return fields


def number(name: str, value: float) -> float:
    """Counts as integers; what is measured or divided stays a float."""
    measured = name.endswith(("seconds", "_rate")) or "_per_" in name
    return value if measured or not value.is_integer() else int(value)


def cut_short(answers: Sequence[Answer]) -> str | None:
    """The notice about answers that the context ends before --max-new-tokens; None without any."""
    cut = [
        answer
        for answer in answers
        if answer.finish_reason == "length" and len(answer.token_ids) < answer.submit.max_new_tokens
    ]
    if not cut:
        return None
    which = "the answer ends" if len(answers) == 1 else f"{len(cut)} of {len(answers)} answers end"
    some = f"after {len(cut[0].token_ids)} tokens, " if len(cut) == 1 else ""
    limit = cut[0].submit.max_new_tokens
    end = "; -n N ends it earlier" if limit == MAX_INT else f", before --max-new-tokens {limit}"
    return f"{which} {some}where the target's context does{end}"


def limited(answers: Sequence[Answer]) -> str | None:
    """The notice about answers that --max-new-tokens ends; None without any."""
    cut = [answer for answer in answers if answer.finish_reason == "length"]
    if not cut:
        return None
    which = "the answer is" if len(answers) == 1 else f"{len(cut)} of {len(answers)} answers are"
    return f"{which} cut at {cut[0].submit.max_new_tokens} tokens (--max-new-tokens)"
