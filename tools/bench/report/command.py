"""``python tools/bench report``: the papers' tables and figures, in shape, from one command.

Policies by token sources by prompt sets by temperatures. On the virtual clock (the default) real
token sources draft for the real machines, and stages are priced; with ``--engine real`` cells are
processes on this machine. Results are kept one by one: a run that was killed goes on where it was.
The report defines its numbers; docs/results/papers.md is one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from asyncspec.sim.costs import ClusterCost
from asyncspec_nodes.console.bounds import COUNT
from tools.bench.options import SEVERAL, check_numbers
from tools.bench.prompts import read_sets
from tools.bench.report.exhibit import Exhibit, cells
from tools.bench.report.exhibits import choose
from tools.bench.report.exhibits.own import SOURCE_TABLE
from tools.bench.report.identity import commit, machine
from tools.bench.report.markdown import page
from tools.bench.report.measuring import measured
from tools.bench.report.models import Models
from tools.bench.report.source_table import source_rows
from tools.bench.report.table import Table, fill


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench report``."""
    parser.add_argument("--prompts", type=Path, required=True, help="folder of *.jsonl, a set each")
    parser.add_argument("--out", type=Path, required=True, help="folder for results and pages")
    parser.add_argument("--engine", choices=("virtual", "real"), default="virtual")
    parser.add_argument("--only", help="names of tables and figures, joined by commas")
    parser.add_argument("--per-file", type=int, default=2, help="prompts from each file (2)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of each answer (64)")
    parser.add_argument("--stages", type=int, help="instead of each paper's own number")
    parser.add_argument("--jobs", type=int, default=1, help="processes that measure")
    parser.add_argument("--target", help="directory of the target (the bundled one)")
    parser.add_argument("--draft", help="directory of the draft model (the bundled one)")
    parser.add_argument("--eagle", help="directory of the EAGLE head (the bundled one)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(options: argparse.Namespace) -> int:
    """Measure what is missing, and write the report."""
    check_numbers(options, per_file=COUNT, max_new_tokens=SEVERAL, stages=COUNT, jobs=COUNT)
    report(options)
    return 0


def report(options: argparse.Namespace) -> None:
    """As ``run``. Raises ``AsyncSpecError``."""
    sets = read_sets(options.prompts, options.per_file)
    exhibits = [_on(options.engine, one) for one in _chosen(options)]
    models = Models(**_given(options, "target", "draft", "eagle"))
    models.check()
    wanted = [
        cell
        for exhibit in exhibits
        for point in exhibit.points
        for cell in cells(exhibit, point, sets, options.max_new_tokens)
    ]
    plan = measured(wanted, models, options.out, options.jobs)
    about = {
        "commit": commit(),
        "machine": machine(),
        "engine": options.engine,
        "models": models.fingerprints(),
        "prompts": ", ".join(f"{name} ({len(prompts)})" for name, prompts in sets.items()),
        "new tokens": f"at most {options.max_new_tokens} each",
    }
    filled = [(one, fill(one, sets, options.max_new_tokens, plan.result)) for one in exhibits]
    _write(options, about, filled, models)


def _chosen(options: argparse.Namespace) -> list[Exhibit]:
    return choose(options.only, options.stages, real=options.engine == "real")


def _given(options: argparse.Namespace, *names: str) -> dict[str, str]:
    values = {name: getattr(options, name) for name in names}
    return {name: str(Path(value).absolute()) for name, value in values.items() if value}


def _on(engine: str, exhibit: Exhibit) -> Exhibit:
    """The exhibit on an engine. Real processes cost what they cost."""
    if engine == "virtual":
        return exhibit
    points = tuple(
        replace(point, setting=replace(point.setting, engine="real", cost=ClusterCost()))
        for point in exhibit.points
    )
    return replace(exhibit, points=points)


def _write(
    options: argparse.Namespace,
    about: dict[str, Any],
    filled: Sequence[tuple[Exhibit, Sequence[Table]]],
    models: Models,
) -> None:
    from tools.bench.report.plots import draw

    shown = [(one, tables, draw(one, tables, options.out)) for one, tables in filled]
    (options.out / "report.md").write_text(page(about, shown), encoding="utf-8")
    data: dict[str, Any] = {
        "about": about,
        "exhibits": {one.name: {"paper": one.paper, "tables": tables} for one, tables in filled},
    }
    for one, tables in filled:
        if one.name == SOURCE_TABLE:
            # Flat, so that it can be recorded (--record FILE#TABLE:sources).
            data["sources"] = [*source_rows(tables[0], models)]
    text = msgspec.json.format(msgspec.json.encode(data), indent=1)
    (options.out / "report.json").write_bytes(text + b"\n")
    if options.json:
        print(text.decode())
