"""``python tools/bench policies``: every policy on the same prompts, as one Markdown table.

Real processes on this machine, through the command line a user would type. Sums over all prompts,
then ratios; docs/reference/metrics.md defines the columns.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track

from asyncspec_nodes.console.bounds import COUNT
from tools.bench.options import SEVERAL, TEMPERATURE, check_numbers
from tools.bench.processes import run_prompts
from tools.bench.prompts import read_sets

POLICIES = ("autoregressive", "chunked", "pruned", "flowspec-no-sbd", "flowspec", "flow")
COLUMNS = (
    "policy",
    "tokens a round",
    "turns a token",
    "wasted rows a token",
    "hit rate",
    "tokens/s",
    "ratio",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench policies``."""
    parser.add_argument("--prompts", type=Path, required=True, help="folder of *.jsonl prompts")
    parser.add_argument("--per-file", type=int, default=3, help="prompts from each file")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--draft", help="token source, as asyncspec run names it")
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    check_numbers(
        options,
        per_file=COUNT,
        max_new_tokens=SEVERAL,
        stages=COUNT,
        temperature=TEMPERATURE,
    )
    sets = read_sets(options.prompts, options.per_file)
    prompts = [prompt.text for some in sets.values() for prompt in some]
    rows = {policy: measure(policy, prompts, options) for policy in progress(POLICIES)}
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print("\n".join(table(rows)))
    return 0


def progress(policies: Sequence[str]) -> Iterable[str]:
    """The policies, with a bar on standard error."""
    return track(policies, description="policies", console=Console(stderr=True))


def measure(policy: str, prompts: Sequence[str], options: argparse.Namespace) -> dict[str, float]:
    """Sums of the statistics over the prompts, and their ratios. Raises ``AsyncSpecError``."""
    words = ["--policy", policy, "--stages", str(options.stages)]
    words += ["--max-new-tokens", str(options.max_new_tokens)]
    words += ["--temperature", str(options.temperature)]
    words += ["--draft", options.draft] if options.draft else []
    sums: Counter[str] = Counter()
    for stats in run_prompts(words, prompts):
        sums.update(stats)
        sums["requests"] += 1
    return ratios(sums)


def ratios(sums: Counter[str]) -> dict[str, float]:
    """What the table shows, from sums over requests."""
    decoded = sums["new_tokens"] - sums["requests"]
    return {
        "requests": sums["requests"],
        "new_tokens": sums["new_tokens"],
        "tokens_per_round": decoded / sums["rounds"],
        "tokens_per_turn": decoded / sums["turns"],
        "turns_per_token": sums["turns"] / decoded,
        "wasted_rows_per_token": sums["wasted_rows"] / decoded,
        "hit_rate": (sums["hit_rate"] / sums["requests"]),
        "tokens_per_second": decoded / sums["decode_seconds"],
        "bytes_per_token": sums["bytes_sent"] / sums["new_tokens"],
    }


def table(rows: dict[str, dict[str, float]]) -> list[str]:
    """Markdown, one row a policy; the ratio is to autoregressive decoding."""
    base = rows["autoregressive"]["tokens_per_second"]
    lines = ["| " + " | ".join(COLUMNS) + " |", "| --- |" + " ---: |" * (len(COLUMNS) - 1)]
    for policy, row in rows.items():
        cells = (
            f"`{policy}`",
            f"{row['tokens_per_round']:.2f}",
            f"{row['turns_per_token']:.2f}",
            f"{row['wasted_rows_per_token']:.0f}",
            f"{row['hit_rate']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['tokens_per_second'] / base:.2f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines
