"""``python tools/bench padded``: six emulated clusters of real processes next to the simulator.

Stages of the bundled target and what drafts for it are padded to given times and wait for most of
them. The simulator runs the same machines, texts and token sources on its virtual clock. Both say
how many times as fast as plain pipelining each policy is.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console
from rich.progress import Progress

from asyncspec.core.costs import DraftCost, StageCost
from asyncspec.core.errors import ClusterError
from asyncspec.sim.costs import ClusterCost, LinkCost
from asyncspec_nodes.cluster.checkpoints import BUNDLED_DRAFT, BUNDLED_TARGET
from asyncspec_nodes.cluster.config import Config, DraftTable, PaceTable, TargetTable
from asyncspec_nodes.local.cluster import LocalCluster, local_config
from tools.bench.grid import PLAIN
from tools.bench.limits.requests import OPENINGS, speed, turn_about
from tools.bench.options import print_rows
from tools.bench.prompts import Prompt
from tools.bench.random_model import save_random
from tools.bench.report.cell import Ask, Cell, Setting
from tools.bench.report.models import Models
from tools.bench.report.virtual import VirtualEngine

TOKENS = {PLAIN: 24, "chain": 64, "flowspec": 64, "flow": 64}
"""New tokens of an answer, by policy."""

HOP_SECONDS = 0.0005
"""From one process to the next on one machine, by ``bench limits``."""


class Case(Struct, frozen=True):
    """A cluster. Times are shares of a pass."""

    name: str
    stages: int
    # As in ``Models.source``; "useless": a draft model of random weights.
    source: str
    pass_seconds: float = 0.04
    level: float = 0.1
    row: float = 0.0
    plateau: int = 16

    @property
    def stage(self) -> StageCost:
        """Of each stage."""
        return StageCost(self.pass_seconds, self.plateau, self.row * self.pass_seconds)

    @property
    def level_seconds(self) -> float:
        """Of each draft pass."""
        return self.level * self.pass_seconds


CASES = (
    Case("2 stages, a good draft", 2, "draft"),
    Case("4 stages, EAGLE head", 4, "eagle"),
    Case("8 stages, a good draft", 8, "draft", pass_seconds=0.03),
    Case("4 stages, n-gram lookup, rows at .11 of a pass", 4, "ngram", row=0.11, plateau=1),
    Case("3 stages, a draft of half a pass a level", 3, "draft", level=0.5),
    Case("4 stages, a useless draft", 4, "useless"),
)


class Row(Struct, frozen=True):
    """A case; times as fast as plain pipelining, by policy."""

    case: Case
    simulated: Mapping[str, float]
    measured: Mapping[str, float]

    @property
    def same_order(self) -> bool:
        """Whether policies that the simulator holds more than a tenth apart are in its order."""
        pairs = [(a, b) for a in self.simulated for b in self.simulated]
        return all(
            self.measured[a] > self.measured[b]
            for a, b in pairs
            if self.simulated[a] > 1.1 * self.simulated[b]
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Raises ``AsyncSpecError``, also where texts differ."""
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, Progress(console=Console(stderr=True)) as bar:
        useless = random_draft(Path(folder))
        task = bar.add_task("padded clusters", total=len(CASES))
        for case in CASES:
            found.append(as_dict(measure(case, useless)))
            sys.stderr.write(f"{found[-1]}\n")
            bar.advance(task)
    print_rows(options, found)
    return 0


def random_draft(folder: Path) -> str:
    """A draft model like the bundled one, with random weights."""
    import torch
    from transformers import AutoConfig, AutoTokenizer

    save_random(AutoConfig.from_pretrained(BUNDLED_DRAFT), folder, torch.float32)
    AutoTokenizer.from_pretrained(BUNDLED_DRAFT).save_pretrained(folder)
    return str(folder)


def measure(case: Case, useless: str) -> Row:
    """Both ways, one after the other. Raises ``AsyncSpecError``."""
    models = Models(draft=useless) if case.source == "useless" else Models()
    source = "draft" if case.source == "useless" else case.source
    return Row(
        case,
        over_plain(simulated(case, models, source)),
        over_plain(asyncio.run(measured(padded(case, models.source(source))))),
    )


def over_plain(speeds: Mapping[str, float]) -> dict[str, float]:
    """Ratios of tokens a second."""
    return {policy: rate / speeds[PLAIN] for policy, rate in speeds.items() if policy != PLAIN}


def simulated(case: Case, models: Models, source: str) -> dict[str, float]:
    """Tokens a second by policy, prompts left out."""
    engine = VirtualEngine(models)
    cost = ClusterCost(
        stage=case.stage, draft=DraftCost(case.level_seconds), wire=LinkCost(latency=HOP_SECONDS)
    )
    decoded, seconds = dict.fromkeys(TOKENS, 0.0), dict.fromkeys(TOKENS, 0.0)
    for number, text in enumerate(OPENINGS):
        ask = Ask(Prompt("openings", number, text), tokens=max(TOKENS.values()))
        answer = engine.target.write(ask)
        if len(answer) < ask.tokens:
            raise ClusterError(f"{text!r} has an answer of {len(answer)} tokens")
        for policy, tokens in TOKENS.items():
            setting = Setting(policy, source, case.stages, cost)
            stats = engine.measure(Cell(replace(ask, tokens=tokens), setting), answer[:tokens])
            decoded[policy] += stats["new_tokens"] - 1
            seconds[policy] += stats["decode_seconds"]
    return {policy: decoded[policy] / seconds[policy] for policy in TOKENS}


async def measured(config: Config) -> dict[str, float]:
    """The same of real processes, policies in turn."""
    async with LocalCluster(config, lambda report: None) as cluster:
        replies = (await turn_about({"": cluster}, TOKENS, lambda: None))[""]
    return {policy: speed(some).tokens_per_second for policy, some in replies.items()}


def padded(case: Case, source: str) -> Config:
    """The cluster file of a case."""
    stage = case.stage
    return local_config(
        TargetTable(path=str(BUNDLED_TARGET)),
        DraftTable(source=source),
        case.stages,
        1,
        stage_pace=PaceTable(
            seconds=stage.pass_seconds, plateau=stage.plateau, row_seconds=stage.row_seconds
        ),
        draft_pace=PaceTable(level_seconds=case.level_seconds),
    )


def as_dict(row: Row) -> dict[str, Any]:
    """A line of the table."""
    line: dict[str, Any] = {"cluster": row.case.name}
    for policy, ratio in row.simulated.items():
        line[f"{policy}, simulated"] = round(ratio, 2)
        line[f"{policy}, measured"] = round(row.measured[policy], 2)
    return line | {"same order": "yes" if row.same_order else "no"}
