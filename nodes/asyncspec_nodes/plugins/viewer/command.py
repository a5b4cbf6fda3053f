"""``asyncspec trace``: a recorded run as a page, a table, a Perfetto file, or replayed."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from asyncspec.core.errors import UserError, writing
from asyncspec.trace.file import read_trace
from asyncspec.trace.records import Trace
from asyncspec_nodes.console.arguments import Parser
from asyncspec_protocol.errors import printable

if TYPE_CHECKING:
    from rich.table import Table

    from asyncspec_nodes.plugins.viewer.analysis.summary import Summary

SHARES = ("useful", "wrong", "dead", "unknown", "drafting", "cache", "sending", "credit", "idle")
"""Fields of ``Utilisation``, columns of the summary."""

MIN_SHARE = 0.005
"""Share of the decoding time: work that took less is left out of the summary."""


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="a trace, as run --trace or record writes it")
    add("-o", "--output", type=Path, metavar="HTML", help="default: FILE with .html")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--summary", action="store_true", help="print where the time went instead of a page"
    )
    what.add_argument(
        "--perfetto", type=Path, metavar="JSON", help="write trace events for Perfetto instead"
    )
    what.add_argument(
        "--replay", action="store_true", help="feed the inputs to the machines again and compare"
    )
    add("--json", action="store_true", help="with --summary: one JSON object on stdout")
    add("--partial", action="store_true", help="forgive a last line that was cut off")


def run(arguments: argparse.Namespace) -> int:
    if arguments.json and not arguments.summary:
        raise UserError("--json goes with --summary")
    trace = read_trace(arguments.file, partial=arguments.partial)
    if not trace.lines:
        raise UserError(f"{arguments.file} has a header and no events")
    if arguments.replay:
        return _replay(trace)
    path = arguments.perfetto or arguments.output or arguments.file.with_suffix(".html")
    if not arguments.summary and path.resolve() == arguments.file.resolve():
        option = "--output" if arguments.perfetto is None else "--perfetto"
        raise UserError(f"{path} is the trace itself; give {option} another file")
    from asyncspec_nodes.plugins.viewer.analysis.build import build
    from asyncspec_nodes.plugins.viewer.analysis.perfetto import export
    from asyncspec_nodes.plugins.viewer.analysis.summary import summarise
    from asyncspec_nodes.plugins.viewer.page import page

    timeline = build(trace)
    if arguments.json:
        sys.stdout.write(_json(summarise(timeline)) + "\n")
    elif arguments.summary:
        print_summary(summarise(timeline))
    elif arguments.perfetto is not None:
        _write(path, export(timeline))
    else:
        _write(path, page(timeline, summarise(timeline)).encode())
    return 0


def _write(path: Path, data: bytes) -> None:
    with writing(str(path)):
        path.write_bytes(data)
    sys.stdout.write(f"{path}\n")


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _replay(trace: Trace) -> int:
    from asyncspec_nodes.plugins.viewer.replay import replay

    nodes = replay(trace.lines)
    for node in nodes:
        difference = node.difference
        result = "the same effects" if difference is None else "other effects in the last"
        sys.stdout.write(f"rank {node.rank}: {node.steps} steps, {result}\n")
        if difference is not None:
            sys.stdout.write(f"  recorded: {_json(difference.recorded)}\n")
            sys.stdout.write(f"  replayed: {_json(difference.replayed)} {difference.error}\n")
    return 0 if all(node.difference is None for node in nodes) else 1


def print_summary(summary: Summary) -> None:
    """What the policy did and the bottleneck, then the tables behind it."""
    from rich.console import Console

    # A trace is a foreign file: none of its text is markup, or controls the terminal.
    console = Console(markup=False, highlight=False)
    headline = printable(f"{summary.speculation} {summary.bottleneck}".lstrip())
    console.print(f"{headline}\n", style="bold")
    console.print(
        f"{summary.tokens} tokens, {summary.rounds} rounds, {summary.misses} misses, "
        f"{summary.tokens_per_round:.2f} tokens a round, hit rate {summary.hit_rate:.0%}, "
        f"{summary.rows_in_flight:.1f} rows in flight\n"
    )
    # Most traces leave nothing unknown.
    unknown = any(one.unknown for one in summary.devices)
    shares = [share for share in SHARES if unknown or share != "unknown"]
    devices = (
        [one.device, f"{one.busy:.0%}", *(f"{getattr(one, share):.0%}" for share in shares)]
        for one in summary.devices
    )
    title = "Utilisation of the time in which requests ran"
    console.print(_table(title, ("device", "busy", *shares), devices))
    if summary.decoding:
        title = "Where the tokens' time went (decoding)"
        console.print(_table(title, ("work", "seconds", "share"), _decoding(summary)))
    depths = ([f"{d.depth}", f"{d.tokens}", f"{d.hits / d.tokens:.0%}"] for d in summary.acceptance)
    title = "Tokens by depth below the tip"
    console.print(_table(title, ("depth", "tokens", "in the tree"), depths))
    hops = (
        [hop.hop, f"{hop.frames}", f"{hop.nbytes:,}", f"{hop.bytes_per_token:,.0f}"]
        for hop in summary.hops
    )
    console.print(_table("Links", ("hop", "frames", "bytes", "bytes a token"), hops))
    for clock in summary.clocks:
        if clock.probes:
            console.print(
                f"clock of rank {clock.rank}: within {clock.uncertainty * 1e3:.2f} ms "
                f"({clock.probes} probes, drift {clock.drift * 1e6:+.0f} ppm)"
            )
    for rank, count in summary.dropped:
        console.print(f"rank {rank} lost {count} events")


def _table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        table.add_row(*map(printable, row))
    return table


def _decoding(summary: Summary) -> Iterable[list[str]]:
    """Work and time that the tokens after the first waited for, over all requests."""
    total = sum(breakdown.seconds for breakdown in summary.decoding) or 1.0
    kinds: Counter[str] = Counter()
    for breakdown in summary.decoding:
        kinds.update(breakdown.kinds)
    for kind, seconds in kinds.most_common():
        if seconds / total >= MIN_SHARE:
            yield [kind, f"{seconds:.3f}", f"{seconds / total:.0%}"]
