"""``asyncspec simulate``: the same machines on a virtual clock, one policy after another."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from asyncspec.trace.file import TraceWriter
from asyncspec_nodes.cli import simulate_options
from asyncspec_nodes.cli.simulate_options import SimulateOptions
from asyncspec_nodes.cli.simulate_output import as_dict, table
from asyncspec_nodes.simulation.cluster import Outcome, simulate


def run(arguments: argparse.Namespace) -> int:
    """The whole command. Raises ``AsyncSpecError``, also where a run's text is not the target's."""
    options = simulate_options.read_arguments(arguments)
    # Before the run: a file that cannot be written is a mistake to be told at once.
    writer = None if options.trace is None else TraceWriter(options.trace, _title(options))
    with _bars() as bars, _no_collector():
        outcomes = [_simulate(options, policy, bars) for policy in options.policies]
    if writer is not None:
        with closing(writer):
            writer.add(list(outcomes[0].trace))
    _print(options, outcomes)
    return 0


def _simulate(options: SimulateOptions, policy: str, bars: Progress) -> Outcome:
    setting = options.setting
    task: TaskID = bars.add_task(policy, total=setting.tokens * setting.requests)
    outcome = simulate(
        setting,
        policy,
        record=options.trace is not None,
        progress=lambda tokens, _: bars.update(task, completed=tokens),
    )
    bars.remove_task(task)
    return outcome


@contextmanager
def _bars() -> Iterator[Progress]:
    """A bar for each policy on stderr, if that is a terminal; removed at the end."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bars:
        yield bars


@contextmanager
def _no_collector() -> Iterator[None]:
    """Machines and messages are values without cycles: a sixth of the time would go into looking
    for some."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _title(options: SimulateOptions) -> str:
    policy, setting = options.policies[0], options.setting
    return f"simulated: {policy}, {setting.stages} stages, costs {options.costs}"


def _print(options: SimulateOptions, outcomes: Sequence[Outcome]) -> None:
    if options.json:
        sys.stdout.write(msgspec.json.encode(as_dict(options, outcomes)).decode() + "\n")
    else:
        sys.stdout.write(table(options, outcomes))
