"""Cells on real processes of this machine."""

from __future__ import annotations

from collections.abc import Sequence

from tools.bench.processes import run_prompts
from tools.bench.report.cell import Cell, Stats
from tools.bench.report.models import Models


def measure_real(models: Models, cells: Sequence[Cell]) -> list[Stats]:
    """Run cells that differ in their prompts alone, on one cluster. Raises as ``run_prompts``."""
    answers = run_prompts(options(models, cells[0]), [cell.ask.prompt.text for cell in cells])
    return [answer["stats"] for answer in answers]


def options(models: Models, cell: Cell) -> list[str]:
    """What ``asyncspec run`` is told of a cell's setting."""
    setting, ask = cell.setting, cell.ask
    given = {
        "--target": models.target,
        "--draft": models.source(setting.source),
        "--policy": setting.policy,
        "--stages": setting.stages,
        "--max-new-tokens": ask.tokens,
        "--temperature": ask.sampling.temperature,
        "--top-p": ask.sampling.top_p,
        "--top-k": ask.sampling.top_k,
        "--seed": ask.sampling.seed,
    }
    return [word for pair in given.items() for word in map(str, pair)]
