"""SpecPipe's Figures 16 and 17 on the virtual clock: policies that share passes, and that do not.

A pool of requests; a new one starts whenever fewer than so many run (SpecPipe 4.4).
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from asyncspec.sim.costs import PRESETS
from asyncspec.sim.language import Language, Synthetic, harmonic
from asyncspec_nodes.plugins.simulation.cluster import Setting, simulate
from tools.bench.collector import no_collector
from tools.bench.limits.progress import Tick
from tools.bench.serving.load import Load, steady

RUNNING = (1, 2, 4, 8, 16, 32)
COSTS = ("server", "jetson-7b")
STAGES = 8
POOL, TOKENS, PROMPT_TOKENS = 60, 128, 64

HEAD: Language = Synthetic(harmonic(0.78), decay=0.95)
"""An EAGLE head, as ``asyncspec simulate`` has it by default."""


class Series(Struct, frozen=True):
    """A curve: a policy, and whether requests share passes."""

    name: str
    policy: str
    # Rows of a shared pass; 1: every segment has a pass of its own.
    batch_rows: int = 256


SERIES = (
    # The stand-in for PP-vLLM.
    Series("autoregressive", "autoregressive"),
    Series("autoregressive, unbatched", "autoregressive", batch_rows=1),
    Series("static-tree", "static-tree"),
    Series("specpipe", "specpipe"),
    Series("flowspec", "flowspec"),
)


class Curve(Struct, frozen=True):
    """One series under one cost model."""

    costs: str
    series: str
    loads: tuple[Load, ...]

    def at(self, running: int) -> Load:
        """The load of so many requests at a time."""
        return next(load for load in self.loads if load.running == running)


def measure(
    tick: Tick,
    *,
    costs: Sequence[str] = COSTS,
    running: Sequence[int] = RUNNING,
    pool: int = POOL,
    tokens: int = TOKENS,
) -> list[Curve]:
    """All series under all costs. Times are in passes of a stage."""
    return [
        Curve(name, series.name, tuple(_loads(name, series, running, pool, tokens, tick)))
        for name in costs
        for series in SERIES
    ]


def _loads(
    costs: str, series: Series, running: Sequence[int], pool: int, tokens: int, tick: Tick
) -> list[Load]:
    loads = []
    for count in running:
        setting = Setting(
            HEAD,
            PRESETS[costs],
            stages=STAGES,
            tokens=tokens,
            prompt_tokens=PROMPT_TOKENS,
            # Two at least for each place, or the load would never be steady.
            requests=max(pool, 2 * count),
            sessions=count,
            batch_rows=series.batch_rows,
        )
        with no_collector():
            loads.append(steady(simulate(setting, series.policy).times, count))
        tick()
    return loads
