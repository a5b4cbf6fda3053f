"""The command ``schedules``: random schedules in several processes, and what became of them."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Sequence

from msgspec import Struct, to_builtins
from rich.console import Console
from rich.progress import Progress

import fault_schedules
from asyncspec_nodes.console.arguments import Parser, Version
from tools.bench.pool import as_done

BLOCK = 50
MOST_REPORTS = 5
"""Failing schedules that are reduced, which takes some seconds each."""


class Block(Struct, frozen=True):
    """What became of some schedules."""

    faults: dict[str, int]
    failed: tuple[int, ...]
    steps: int
    cpu_seconds: float


def run(seeds: range) -> Block:
    """Run the schedules of these numbers."""
    faults: Counter[str] = Counter()
    failed: list[int] = []
    steps, start = 0, time.process_time()
    for seed in seeds:
        try:
            world = fault_schedules.run(fault_schedules.drawn(seed)).world
        except Exception:
            failed.append(seed)
        else:
            faults.update(world.struck)
            steps += world.steps
    return Block(dict(faults), tuple(failed), steps, time.process_time() - start)


def main(description: str | None, argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 every law holds, 1 one is broken or it was interrupted, 2 a user's mistake."""
    parser = Parser("schedules", description=description)
    parser.add_argument("--version", action=Version)
    parser.add_argument("--count", type=int, default=10_000, help="schedules (10000)")
    parser.add_argument("--first", type=int, help="number of the first one (random)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--json", action="store_true", help="the result on stdout, nothing else")
    options = parser.parse_args(argv)
    if options.count < 1 or options.jobs < 1 or (options.first or 0) < 0:
        parser.error("--count and --jobs are at least 1, --first is at least 0")
    first = secrets.randbelow(2**48) if options.first is None else options.first
    try:
        result = _run(range(first, first + options.count), options)
    except KeyboardInterrupt:
        sys.stderr.write("schedules: interrupted\n")
        return 1
    sys.stdout.write(json.dumps(result, indent=1) + "\n" if options.json else _text(result))
    return int(bool(result["failed"]))


def _run(seeds: range, options: argparse.Namespace) -> dict[str, object]:
    blocks = [seeds[at : at + BLOCK] for at in range(0, len(seeds), BLOCK)]
    faults: Counter[str] = Counter()
    failed: list[int] = []
    steps, cpu, start = 0, 0.0, time.monotonic()
    with Progress(console=Console(stderr=True), disable=options.json) as progress:
        bar = progress.add_task("schedules", total=len(seeds))
        for seen, block in as_done(options.jobs, run, blocks):
            faults.update(block.faults)
            failed += block.failed
            steps += block.steps
            cpu += block.cpu_seconds
            progress.advance(bar, len(seen))
    return {
        "schedules": len(seeds),
        "first": seeds.start,
        "failed": sorted(failed),
        "reports": [fault_schedules.report(seed) for seed in sorted(failed)[:MOST_REPORTS]],
        "faults": to_builtins(dict(sorted(faults.items()))),
        "steps": steps,
        "seconds": round(time.monotonic() - start, 1),
        "cpu_seconds": round(cpu, 1),
    }


def _text(result: dict[str, object]) -> str:
    reports = result["reports"]
    assert isinstance(reports, list)
    faults = result["faults"]
    assert isinstance(faults, dict)
    failed = result["failed"]
    assert isinstance(failed, list)
    struck = ", ".join(f"{count} {kind}" for kind, count in faults.items())
    return "\n".join(
        [
            *reports,
            f"{result['schedules']} schedules from {result['first']} on: {len(failed)} failed",
            f"{struck}; {result['steps']} steps in {result['seconds']} s",
            "",
        ]
    )
