"""``python tools/bench hybrid``: mixes of token sources next to the better of their parts.

Tokens a turn on the virtual clock, every pass a turn, under several policies and at two
temperatures, set by set: sums over all prompts of a set, then the ratio. The better part is the one
that makes more tokens a turn on the set. In brackets 95 % of a paired bootstrap over the prompts:
where that spans 0, the difference is noise. What policies make with the mix stands below. With
``--costs slow-draft`` the draft node's cores are slow, and a turn is a pass's time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from asyncspec.core.sampling import Sampling
from asyncspec.policy.registry import split
from asyncspec_nodes.console.bounds import COUNT
from tools.bench.options import SEVERAL, check_numbers, check_policies
from tools.bench.paired import Gain, Pair, compare
from tools.bench.prompts import Prompt, Sets, read_sets
from tools.bench.report.cell import Ask, Cell, Setting, Stats
from tools.bench.report.costs import SLOW_DRAFT, TURNS, asked
from tools.bench.report.exhibit import ALL
from tools.bench.report.measuring import measured
from tools.bench.report.metrics import ratio
from tools.bench.report.models import Models

MIXES = {"hybrid": ("draft", "ngram"), "eagle+ngram": ("eagle", "ngram")}
"""Mixes and their parts."""

POLICIES = "flowspec,specpipe,pipedec,chunked,chain,static-tree"
TEMPERATURES = (0.0, 1.0)
COSTS = {"turns": TURNS, "slow-draft": SLOW_DRAFT}


class Row(Struct, frozen=True):
    """A mix under a policy on one set."""

    policy: str
    temperature: float
    mix: str
    set: str
    # Tokens a turn, of the mix and of its parts.
    alt: dict[str, float]
    # The part that makes more of them, and how much more than that the mix makes.
    better: str
    gain: Gain


Result = Callable[[Cell], Stats]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench hybrid``."""
    parser.add_argument("--prompts", type=Path, required=True, help="folder of *.jsonl, a set each")
    parser.add_argument("--out", type=Path, help="folder of results: a killed run goes on there")
    parser.add_argument("--policies", default=POLICIES, help="names, joined by commas")
    parser.add_argument("--costs", choices=tuple(COSTS), default="turns", help="(turns)")
    parser.add_argument("--per-file", type=int, default=4, help="prompts from each file (4)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of each answer (128)")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=1, help="processes that measure")
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Measure what is missing, and print."""
    rows = list(_rows(options))
    if options.json:
        print(json.dumps(msgspec.to_builtins(rows), indent=1))
    else:
        print("\n".join(table(rows)))
    return 0


def _rows(options: argparse.Namespace) -> Iterator[Row]:
    check_numbers(options, per_file=COUNT, max_new_tokens=SEVERAL, stages=COUNT, jobs=COUNT)
    policies = split(options.policies)
    check_policies(policies)
    sets = read_sets(options.prompts, options.per_file)
    models = Models()
    groups = [(policy, t) for t in TEMPERATURES for policy in policies]
    wanted = [
        cell
        for group in groups
        for source in dict.fromkeys(name for mix in MIXES.items() for name in (mix[0], *mix[1]))
        for some in sets.values()
        for cell in cells(options, *group, source, some)
    ]
    with tempfile.TemporaryDirectory() as spare:
        plan = measured(wanted, models, options.out or Path(spare), options.jobs)
    for policy, temperature in groups:
        for mix in MIXES:
            yield from compared(options, policy, temperature, mix, sets, plan.result)


def cells(
    options: argparse.Namespace,
    policy: str,
    temperature: float,
    source: str,
    prompts: Sequence[Prompt],
) -> list[Cell]:
    """One source on some prompts."""
    setting = Setting(policy, source, options.stages, asked(COSTS[options.costs], source))
    sampling = Sampling(temperature=temperature)
    return [Cell(Ask(p, sampling, options.max_new_tokens), setting) for p in prompts]


def compared(
    options: argparse.Namespace,
    policy: str,
    temperature: float,
    mix: str,
    sets: Sets,
    result: Result,
) -> Iterator[Row]:
    """A mix on every set, and on all of them together."""
    everything = tuple(prompt for some in sets.values() for prompt in some)
    for name, prompts in {**sets, ALL: everything}.items():
        stats = {
            source: [result(cell) for cell in cells(options, policy, temperature, source, prompts)]
            for source in (mix, *MIXES[mix])
        }
        made = {source: [_made(one, options.costs) for one in stats[source]] for source in stats}
        alt = {
            source: ratio(sum(tokens for tokens, _ in some), sum(turns for _, turns in some))
            for source, some in made.items()
        }
        better = max(MIXES[mix], key=alt.__getitem__)
        pairs = [Pair(*ours, *theirs) for ours, theirs in zip(made[mix], made[better], strict=True)]
        yield Row(policy, temperature, mix, name, alt, better, compare(pairs))


def _made(stats: Stats, costs: str) -> tuple[float, float]:
    """Tokens, and the turns they took."""
    cost = COSTS[costs]
    seconds = stats["decode_seconds"] / cost.stage.pass_seconds
    return stats["new_tokens"] - 1, stats["turns"] if cost is TURNS else seconds


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown: policies down, sets across; percent more than the better part, and the mix's tokens
    a turn."""
    sets = list(dict.fromkeys(row.set for row in rows))
    by_place = {(row.temperature, row.mix, row.policy, row.set): row for row in rows}
    lines: list[str] = []
    for temperature, mix in dict.fromkeys((row.temperature, row.mix) for row in rows):
        shown = {"% more than the better part": _gain, "tokens a turn": _tokens}
        for title, show in shown.items():
            lines += ["", f"**{mix}, T = {temperature:g}: {title}**", ""]
            lines.append(f"| policy | {' | '.join(sets)} |")
            lines.append("| --- |" + " ---: |" * len(sets))
            for policy in dict.fromkeys(row.policy for row in rows):
                places = [by_place[temperature, mix, policy, name] for name in sets]
                lines.append(f"| `{policy}` | {' | '.join(map(show, places))} |")
    return lines[1:]


def _tokens(row: Row) -> str:
    return f"{row.alt[row.mix]:.2f}"


def _gain(row: Row) -> str:
    gain = row.gain
    if gain.between is None:
        return f"{100 * gain.gain:+.1f}"
    low, high = gain.between
    return f"{100 * gain.gain:+.1f} ({100 * low:+.0f}..{100 * high:+.0f})"
