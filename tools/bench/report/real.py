"""Cells on real processes of this machine, by the command a user would type."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from asyncspec.errors import ClusterError, UserError
from tools.bench.report.cell import Cell, Stats
from tools.bench.report.models import Models


def measure_real(models: Models, cells: Sequence[Cell]) -> list[Stats]:
    """Run cells that differ in their prompts alone, on one cluster. Raises ``UserError`` or
    ``ClusterError`` with what the command said."""
    prompts = "".join(json.dumps({"prompt": cell.ask.prompt.text}) + "\n" for cell in cells)
    done = subprocess.run(
        command(models, cells[0]), input=prompts, capture_output=True, text=True, check=False
    )
    if done.returncode:
        kind = UserError if done.returncode == 2 else ClusterError
        raise kind(done.stderr.strip())
    return [json.loads(line)["stats"] for line in done.stdout.splitlines()]


def command(models: Models, cell: Cell) -> list[str]:
    """``asyncspec run`` for a cell's setting; prompts come on its standard input."""
    setting, ask = cell.setting, cell.ask
    options = {
        "--target": models.target,
        "--draft": models.source(setting.source),
        "--policy": setting.policy,
        "--stages": setting.stages,
        "--max-new-tokens": ask.tokens,
        "--temperature": ask.sampling.temperature,
        "--top-p": ask.sampling.top_p,
        "--top-k": ask.sampling.top_k,
        "--seed": ask.sampling.seed,
        "--prompts": "/dev/stdin",
    }
    words = [word for pair in options.items() for word in map(str, pair)]
    return [sys.executable, "-m", "asyncspec_nodes.cli", "run", "--json", *words]
