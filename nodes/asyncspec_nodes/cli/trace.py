"""``asyncspec trace``: a recorded run as a page, a table, a Perfetto file, or played again."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from asyncspec.core.errors import UserError
from asyncspec.trace.file import read_trace
from asyncspec.trace.records import Trace
from asyncspec_nodes.console.arguments import Parser


def add_arguments(parser: Parser) -> None:
    """The arguments of ``asyncspec trace``."""
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
    """The whole command. Raises ``AsyncSpecError``."""
    if arguments.json and not arguments.summary:
        raise UserError("--json goes with --summary")
    found = read_trace(arguments.file, partial=arguments.partial)
    if not found.lines:
        raise UserError(f"{arguments.file} has a header and no events")
    if arguments.replay:
        return _replay(found)
    if arguments.summary:
        return _summary(found, as_json=arguments.json)
    if arguments.perfetto is not None:
        return _perfetto(found, _beside("--perfetto", arguments.perfetto, arguments.file))
    page = arguments.output or arguments.file.with_suffix(".html")
    return _page(found, _beside("--output", page, arguments.file))


def _beside(option: str, path: Path, trace: Path) -> Path:
    """Where something goes that is not to take the trace's place. Raises ``UserError``."""
    if path.resolve() == trace.resolve():
        raise UserError(f"{path} is the trace itself; give {option} another file")
    return path


def _page(found: Trace, path: Path) -> int:
    from asyncspec.trace.analysis.build import build
    from asyncspec.trace.analysis.summary import summarise
    from asyncspec.trace.view import page

    timeline = build(found)
    _write(path, lambda: page(timeline, summarise(timeline)).encode())
    return 0


def _perfetto(found: Trace, path: Path) -> int:
    from asyncspec.trace.analysis.build import build
    from asyncspec.trace.analysis.perfetto import export

    _write(path, lambda: export(build(found)))
    return 0


def _write(path: Path, make: Callable[[], bytes]) -> None:
    try:
        path.write_bytes(make())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    sys.stdout.write(f"{path}\n")


def _summary(found: Trace, *, as_json: bool) -> int:
    from rich.console import Console

    from asyncspec.trace.analysis.build import build
    from asyncspec.trace.analysis.summary import summarise
    from asyncspec.trace.summary_text import print_summary

    summary = summarise(build(found))
    if as_json:
        sys.stdout.write(_json(summary) + "\n")
    else:
        print_summary(summary, Console())
    return 0


def _replay(found: Trace) -> int:
    from asyncspec_nodes.simulation.replay import replay

    nodes = replay(found.lines)
    for node in nodes:
        difference = node.difference
        verdict = "the same effects" if difference is None else "other effects in the last"
        sys.stdout.write(f"rank {node.rank}: {node.steps} steps, {verdict}\n")
        if difference is not None:
            sys.stdout.write(f"  recorded: {_json(difference.recorded)}\n")
            sys.stdout.write(f"  replayed: {_json(difference.replayed)} {difference.error}\n")
    return 0 if all(node.difference is None for node in nodes) else 1


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def main(argv: Sequence[str] | None = None) -> int:
    """``python tools/trace``: the same command in a checkout."""
    from asyncspec_nodes.cli.main import main as command

    return command(["trace", *(sys.argv[1:] if argv is None else argv)])
