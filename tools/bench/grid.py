"""``python tools/bench grid``: policy ``flow`` next to the fixed policies over a grid of clusters.

Simulated, with the real machines: stages, rows, drafts, links and acceptance of many kinds. Each
cell's figures are ratios of tokens a second within it. The best of eight fixed policies on one text
owes some percent to that text: of several (``--texts``) the geometric mean counts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import geometric_mean

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from asyncspec.core.costs import DraftCost, StageCost
from asyncspec.core.errors import UserError
from asyncspec.core.rng import uniform
from asyncspec.sim.costs import ClusterCost, Jitter, LinkCost
from asyncspec.sim.language import Coverage, Language, Synthetic, Turning, harmonic, tabled
from asyncspec_nodes.console.bounds import COUNT
from asyncspec_nodes.plugins.simulation.cluster import Setting, simulate
from tools.bench.options import SEVERAL, check_numbers
from tools.bench.pool import as_done
from tools.bench.selection import check_file

PLAIN, FLOWSPEC, FLOW = "autoregressive", "flowspec", "flow"
FIXED = (PLAIN, "chain", "chain-streamed", "static-tree", "pruned", "pipedec", "specpipe", FLOWSPEC)
RATIOS = ("over plain", "over best fixed", "over flowspec")
PLOTS = (".png", ".svg", ".pdf")


class Cell(Struct, frozen=True, forbid_unknown_fields=True):
    """One cluster and load; times in passes of one row of an ordinary stage."""

    stages: int = 4
    # Chances of the draft's candidates by rank; one alone: others as measured of real drafts.
    coverage: tuple[float, ...] = (0.65,)
    # The same from the middle of every answer on; empty: they do not change.
    later: tuple[float, ...] = ()
    # Rows of a pass that are free, and what each further one takes.
    plateau: int = 16
    row_seconds: float = 0.0
    draft_seconds: float = 0.2
    latency: float = 0.0
    # Bytes a pass; 0: no limit.
    bandwidth: float = 0.0
    # Passes of the last stage take this many times as long.
    last_slower: float = 1.0
    jitter: float = 0.0
    sessions: int = 1
    # Seconds within which they come, at random times; 0: all at once.
    arrival_seconds: float = 0.0
    # Processors that all nodes share; 0: every node has one of its own.
    processors: int = 0
    tokens: int = 120
    # Texts in turn, each by nodes that know of no other.
    texts: int = 1

    @property
    def name(self) -> str:
        """What differs from the defaults."""
        usual, found = Cell(), [f"stages={self.stages}"]
        for key in self.__struct_fields__[1:]:
            value = getattr(self, key)
            if value != getattr(usual, key):
                values = value if isinstance(value, tuple) else (value,)
                found.append(f"{key}={'/'.join(f'{one:g}' for one in values)}")
        return " ".join(found)


COVERAGES = (
    (0.55, 0.15, 0.06, 0.04, 0.03, 0.02, 0.02, 0.01),
    (0.9, 0.05, 0.01, 0.01),
    (0.1, 0.03, 0.02, 0.01),
)
"""A middling draft, a good one and a useless one."""


def shared_cells() -> Iterator[Cell]:
    """Draft x stages x processors that all nodes share x row price: 54 cells."""
    for coverage, stages, processors, row in product(COVERAGES, (2, 4, 8), (1, 2, 4), (0.02, 0.1)):
        yield Cell(
            stages=stages,
            coverage=coverage,
            plateau=1,
            row_seconds=row,
            draft_seconds=0.15,
            latency=0.05,
            processors=processors,
        )


def user_cells() -> Iterator[Cell]:
    """Users who come at random times: draft x stages x users x row price: 54 cells."""
    for coverage, stages, users, row in product(COVERAGES, (1, 2, 4), (2, 4, 8), (0.0, 0.1)):
        yield Cell(
            stages=stages,
            coverage=coverage,
            plateau=1 if row else 16,
            row_seconds=row,
            draft_seconds=0.15,
            latency=0.05,
            sessions=users,
            arrival_seconds=10.0 + 2.0 * stages,
        )


def perfect_cells() -> Iterator[Cell]:
    """A draft that is always right, as the target itself is: stages x row price."""
    for stages, row in product((2, 3, 5), (0.0, 0.05)):
        plateau = 1 if row else 16
        yield Cell(stages=stages, coverage=(1.0,), plateau=plateau, row_seconds=row)


def core_cells() -> Iterator[Cell]:
    """Stages x draft x row price x draft level x latency: 108 cells."""
    for coverage, stages, (plateau, row), draft, latency in product(
        COVERAGES,
        (2, 4, 8),
        ((16, 0.0), (1, 0.04), (1, 0.11)),
        (0.1, 0.5),
        (0.0, 1.0),
    ):
        yield Cell(
            stages=stages,
            coverage=coverage,
            plateau=plateau,
            row_seconds=row,
            draft_seconds=draft,
            latency=latency,
        )


def wide_cells(count: int, seed: int = 33) -> Iterator[Cell]:
    """Cells anywhere in a wider space: each value is chosen by a hash of the cell's number."""
    for number in range(count):
        draws = iter(range(1000))

        def one(
            values: Sequence[float], number: int = number, draws: Iterator[int] = draws
        ) -> float:
            return values[int(uniform(seed + number, next(draws)) * len(values))]

        yield Cell(
            stages=int(one((1, 2, 3, 5, 6, 12, 16))),
            coverage=(one((0.1, 0.3, 0.5, 0.65, 0.8, 0.9, 0.97)),),
            later=(one((0.1, 0.5, 0.9)),) if one((0, 0, 0, 1)) else (),
            plateau=int(one((1, 8, 32))),
            row_seconds=one((0.0, 0.02, 0.08, 0.15)),
            draft_seconds=one((0.05, 0.2, 0.7, 2.0)),
            latency=one((0.0, 0.1, 0.5, 2.0, 4.0)),
            bandwidth=one((0.0, 0.0, 2e6, 2e5)),
            last_slower=one((1.0, 1.0, 1.5, 3.0)),
            jitter=one((0.0, 0.0, 0.3)),
            sessions=int(one((1, 1, 1, 2, 4, 16))),
        )


def setting(cell: Cell, text: int = 1) -> Setting:
    """A cell in the simulator."""
    first = Synthetic(_coverage(cell.coverage), seed=text)
    language: Language = first
    prompt = 64
    if cell.later:
        later = Synthetic(_coverage(cell.later), seed=text)
        language = Turning(first, later, prompt + cell.tokens // 2)
    cost = ClusterCost(
        stage=StageCost(plateau=cell.plateau, row_seconds=cell.row_seconds),
        slow={cell.stages: cell.last_slower},
        draft=DraftCost(level_seconds=cell.draft_seconds),
        wire=LinkCost(cell.latency, cell.bandwidth),
        jitter=Jitter(cell.jitter, seed=1),
        processors=cell.processors,
    )
    return Setting(
        language,
        cost,
        stages=cell.stages,
        tokens=cell.tokens,
        prompt_tokens=prompt,
        requests=cell.sessions,
        arrivals=_arrivals(cell),
    )


def _arrivals(cell: Cell) -> tuple[float, ...]:
    if not cell.arrival_seconds:
        return ()
    return tuple(cell.arrival_seconds * uniform(user, 0) for user in range(cell.sessions))


def _coverage(chances: tuple[float, ...]) -> Coverage:
    return harmonic(chances[0]) if len(chances) == 1 else tabled(chances)


def speed(work: tuple[Cell, str]) -> float:
    """Tokens a second of a policy in a cell, over all its sessions, the first tokens left out."""
    cell, policy = work
    found = []
    for text in range(1, 1 + cell.texts):
        times = simulate(setting(cell, text), policy).times
        decoding = max(one[-1] for one in times) - min(one[0] for one in times)
        found.append(sum(len(one) - 1 for one in times) / decoding)
    return geometric_mean(found)


def ratios(speeds: Mapping[str, float]) -> tuple[float, float, float]:
    """``RATIOS`` of one cell."""
    best, flow = max(speeds[name] for name in FIXED), speeds[FLOW]
    return flow / speeds[PLAIN], flow / best, flow / speeds[FLOWSPEC]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench grid``."""
    parser.add_argument(
        "--cells",
        default="core",
        metavar="core|shared|users|perfect|wide|FILE",
        help="108 regular cells, 54 of nodes that share processors, 54 of users who come at random "
        "times, 6 of a perfect draft, cells of a wider space, or a JSON list of cells (default: "
        "core)",
    )
    parser.add_argument("--count", type=int, default=60, help="cells of the wider space")
    parser.add_argument(
        "--tokens", type=int, help="tokens of an answer (64: a cold start; default: the cells' own)"
    )
    parser.add_argument("--texts", type=int, help="a cell (default: the cells' own, 1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help=f"draw a heat map ({', '.join(PLOTS)})"
    )
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Simulate all cells and print ratios: those of the worst cells, means and least values."""
    check_numbers(options, count=COUNT, jobs=COUNT, tokens=SEVERAL, texts=COUNT)
    if options.plot is not None:
        check_file("--plot", options.plot, PLOTS)
    given = {key: getattr(options, key) for key in ("tokens", "texts") if getattr(options, key)}
    cells = [replace(cell, **given) for cell in _cells(options.cells, options.count)]
    work = [(cell, policy) for cell in cells for policy in (*FIXED, FLOW)]
    speeds: dict[Cell, dict[str, float]] = {cell: {} for cell in cells}
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("cells", total=len(work))
        for (cell, policy), found in as_done(options.jobs, speed, work):
            speeds[cell][policy] = found
            progress.advance(bar)
    if options.json:
        print(json.dumps(_as_json(speeds), indent=1), flush=True)
    else:
        Console().print(_table(speeds))
    # Last: what took hours is shown, whatever comes of the figure.
    if options.plot is not None:
        _draw(speeds, options.plot)
    return 0


def _cells(name: str, count: int) -> list[Cell]:
    regular = {
        "core": core_cells,
        "shared": shared_cells,
        "users": user_cells,
        "perfect": perfect_cells,
    }
    if name in regular:
        return list(regular[name]())
    if name == "wide":
        return list(wide_cells(count))
    try:
        return msgspec.json.decode(Path(name).read_bytes(), type=list[Cell])
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"--cells {name}: {error}") from None


def summary(speeds: Mapping[Cell, Mapping[str, float]]) -> list[dict[str, str | float]]:
    """Geometric mean and least value of each ratio."""
    by_ratio = zip(*map(ratios, speeds.values()), strict=True)
    return [
        {
            "tokens a second of flow": name,
            "geometric mean": geometric_mean(found),
            "least": min(found),
        }
        for name, found in zip(RATIOS, by_ratio, strict=True)
    ]


def _as_json(speeds: Mapping[Cell, Mapping[str, float]]) -> dict[str, object]:
    cells = [
        {"cell": cell.name, **dict(zip(RATIOS, ratios(found), strict=True)), "speeds": found}
        for cell, found in speeds.items()
    ]
    return {"cells": len(cells), "ratios": summary(speeds), "by cell": cells}


def _table(speeds: Mapping[Cell, Mapping[str, float]], rows: int = 20) -> Table:
    table = Table(title=f"flow in {len(speeds)} cells, those first where another policy is better")
    table.add_column("cell")
    for name in (*RATIOS, "best fixed"):
        table.add_column(name, justify="right")
    found = sorted(
        ((ratios(one)[1], cell.name, one) for cell, one in speeds.items()), key=lambda f: f[:2]
    )
    for _, name, one in found[:rows]:
        best = max(FIXED, key=lambda policy: one[policy])
        table.add_row(name, *(f"{ratio:.2f}" for ratio in ratios(one)), best)
    table.add_section()
    for kind in ("geometric mean", "least"):
        table.add_row(kind, *(f"{one[kind]:.3f}" for one in summary(speeds)), "")
    return table


def _draw(speeds: Mapping[Cell, Mapping[str, float]], file: Path) -> None:
    """One row a cell, one column a ratio; white is 1."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1 + 0.16 * len(speeds)), dpi=100, layout="constrained")
    axis = figure.subplots()
    values = [[math.log2(ratio) for ratio in ratios(one)] for one in speeds.values()]
    image = axis.imshow(values, cmap="PuOr", vmin=-2, vmax=2, aspect="auto")
    axis.set_xticks(range(len(RATIOS)), RATIOS, fontsize=7)
    axis.set_yticks(range(len(speeds)), [cell.name for cell in speeds], fontsize=5)
    figure.colorbar(image, label="log2 of flow's tokens a second over the other's")
    figure.savefig(file)
