"""What was measured as short pages of Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tools.bench.serving.beside_vllm import Beside
from tools.bench.serving.fairness import Fairness
from tools.bench.serving.load import Load
from tools.bench.serving.memory import Memory
from tools.bench.serving.padded import Padded
from tools.bench.serving.simulated import Curve


def simulated_page(curves: Sequence[Curve]) -> str:
    """A table of loads for each cost model; times in passes of a stage."""
    blocks = []
    for costs in dict.fromkeys(curve.costs for curve in curves):
        series = {curve.series: curve.loads for curve in curves if curve.costs == costs}
        blocks.append(f"Costs `{costs}`:\n\n{_loads(series, 'pass')}")
    return "\n".join(blocks)


def padded_page(found: Padded) -> str:
    """Loads, and what the single-request path gives."""
    alone = [
        (
            name,
            f"{load.tokens_per_second:.2f}",
            f"{load.between_mean:.3f}",
            f"{load.between_p99:.3f}",
            f"{found.single[name]:.3f}",
        )
        for name, load in found.alone.items()
    ]
    head = ("one at a time", "tokens/s", "s between tokens", "P99", "b = 1 with sharing, over it")
    return f"{_loads(found.shared, 's')}\n{_table(head, alone)}"


def beside_vllm_page(found: Beside) -> str:
    """Loads, over vLLM's."""
    return _loads(found.loads, "s")


def fairness_page(found: Fairness) -> str:
    """One sentence."""
    return (
        f"{len(found.tokens)} equal streams, tokens when the first was complete: "
        f"{', '.join(map(str, found.tokens))}; the least has {found.least_share:.3f} of its fair "
        "share.\n"
    )


def memory_page(found: Memory) -> str:
    """Resident MiB by process."""
    head = ("process", "idle", *(f"after {count:,}" for count in found.after))
    rows = [
        (name, f"{idle:.0f}", *(f"{now[name]:.0f}" for now in found.after.values()))
        for name, idle in found.idle.items()
    ]
    return _table(head, rows)


def _loads(series: Mapping[str, Sequence[Load]], unit: str) -> str:
    """A row for each series and number of requests at a time; tokens a second over those of the
    first series with as many."""
    first = {load.running: load for load in next(iter(series.values()))}
    head = ("policy", "at a time", f"tokens/{unit}", "over the first", f"{unit} between tokens")
    rows = [
        (
            name,
            str(load.running),
            f"{load.tokens_per_second:.3f}",
            f"{load.tokens_per_second / first[load.running].tokens_per_second:.2f}",
            f"{load.between_mean:.3f}",
            f"{load.between_p99:.3f}",
            f"{load.answer_p99:.3f}",
            f"{load.little:.3f}",
        )
        for name, loads in series.items()
        for load in loads
    ]
    return _table((*head, "P99", "P99 of answers' means", "Little"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
