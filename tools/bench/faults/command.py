"""Seconds from a fault of a node to the next token of a running answer.

A local cluster with a token source of its own; its nodes are killed, stopped for two seconds, told
to end, or their links are cut without a FIN, while a prompt is read and while an answer is decoded.
Every text is compared with the undisturbed one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.cluster.config import DraftTable, TargetTable
from asyncspec_nodes.console.arguments import Parser
from asyncspec_nodes.console.bounds import COUNT
from asyncspec_nodes.local.cluster import LocalCluster, local_config
from asyncspec_protocol.messages import Submit
from tools.bench.faults import gone, load, machines
from tools.bench.faults.relay import RelayedLauncher
from tools.bench.faults.runs import KINDS, MOMENTS, Bed, Case, Outcome, spread
from tools.bench.selection import chosen_parts

STAGES = 3
NAMES = {
    (0,): "draft node",
    (1,): "first stage",
    (2,): "middle stage",
    (3,): "last stage",
    (4,): "token source",
    (1, 3): "first and last stage",
    (0, 2): "draft node and middle stage",
}
SENTENCE = "Once upon a time there was a little fox who lived in a big forest. "
NEW_TOKENS = 40
TARGET = TargetTable(path=str(BUNDLED_TARGET))
SUBMIT = Submit(0, SENTENCE * 8, NEW_TOKENS, 5, 0.8, 0, 0.95, ignore_eos=True)
RESTARTS = 10_000


def add_arguments(parser: Parser) -> None:
    """The arguments of ``bench faults``."""
    parser.add_argument("--json", action="store_true", help="one list on stdout, nothing else")
    parser.add_argument("--only", metavar="KIND,KIND", help=f"of {', '.join(KINDS)}; default: all")
    load_help = "storms of cancelled requests, 64 at once, long prompts: what they leave behind"
    parser.add_argument("--load", action="store_true", help=load_help)
    machines_help = "a machine (namespace) a node, of which one falls silent; needs root"
    parser.add_argument("--machines", action="store_true", help=machines_help)
    gone_help = "a machine of asyncspec up that goes for good, with and without a spare; needs root"
    parser.add_argument("--gone", action="store_true", help=gone_help)
    COUNT.add_to(parser, "--repeats", "N", "of each fault, or of all loads (default: 3)", default=3)


def run(options: argparse.Namespace) -> int:
    """Measure and print. Exit code 1 where a text differs."""
    if options.load:
        _show(asyncio.run(load.measure(options.repeats)), as_json=options.json)
        return 0
    known: tuple[str, ...] = KINDS
    of = measure
    if options.machines:
        known, of = machines.KINDS, machine_rows
    elif options.gone:
        known, of = gone.KINDS, gone.measure
    kinds = chosen_parts(options.only, dict.fromkeys(known))
    rows = asyncio.run(of(kinds, options.repeats))
    _show(rows, as_json=options.json)
    return 0 if all(row["texts equal"] == row["runs"] for row in rows) else 1


async def machine_rows(kinds: Sequence[str], repeats: int) -> list[machines.Row]:
    """A row for each kind of silence, machine and age of its links."""
    return await machines.measure(TARGET, SUBMIT, kinds, repeats)


async def measure(kinds: Sequence[str], repeats: int) -> list[machines.Row]:
    """A row for each kind of fault, victim and moment."""
    launcher = RelayedLauncher()
    config = local_config(TARGET, DraftTable(source="ngram"), STAGES, 2, separate_source=True)
    cluster = LocalCluster(config, lambda report: None, launch=launcher, restarts=RESTARTS)
    rows = []
    async with cluster:
        bed = Bed(cluster, launcher, SUBMIT)
        await bed.begin()
        for kind in kinds:
            for victims, name in NAMES.items():
                for moment in MOMENTS:
                    rows.append(await _row(bed, Case(kind, victims, moment), name, repeats))
                    sys.stderr.write(f"{json.dumps(rows[-1])}\n")
    return rows


async def _row(bed: Bed, case: Case, name: str, repeats: int) -> machines.Row:
    await bed.settled()
    before = bed.memory_mib()
    outcomes: list[Outcome] = [await bed.run(case) for _ in range(repeats)]
    await bed.settled()
    seconds = [one.seconds for one in outcomes]
    return {
        "fault": case.kind,
        "node": name,
        "during": case.moment,
        "runs": len(outcomes),
        "texts equal": sum(one.equal for one in outcomes),
        **spread(seconds),
        "MiB before": round(before),
        "MiB after": round(bed.memory_mib()),
        "error": next((one.error for one in outcomes if one.error), ""),
    }


def _show(rows: Sequence[machines.Row], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
