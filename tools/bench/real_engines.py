"""What ``bench real`` runs its settings on: paced processes, or stages on a virtual clock."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from asyncspec.core.costs import DraftCost, StageCost
from asyncspec.core.sampling import Sampling
from asyncspec.sim.costs import ClusterCost, LinkCost
from tools.bench.processes import run_prompts
from tools.bench.prompts import Prompt
from tools.bench.report.cell import Ask, Cell
from tools.bench.report.cell import Setting as Priced
from tools.bench.report.costs import PLATEAU, asked
from tools.bench.report.models import Models
from tools.bench.report.virtual import VirtualEngine

VERDICT_SECONDS, LINK_SECONDS = 0.003, 0.0005
"""What the draft node takes for a verdict, and a message on loopback, on slow cores with other work
(docs/notebook.md)."""


class Setting(Struct, frozen=True):
    """What is compared."""

    policy: str
    source: str


Answers = Sequence[Mapping[str, Any]]
"""For each prompt ``token_ids`` and ``stats`` (docs/reference/metrics.md)."""

Engine = Callable[[Setting, float, Sequence[Prompt]], Answers]
"""The answers to some prompts at a temperature."""


def real(options: argparse.Namespace) -> Engine:
    """A cluster of processes for each setting."""

    def answers(setting: Setting, temperature: float, prompts: Sequence[Prompt]) -> Answers:
        words = {
            "--target": options.target,
            "--dtype": options.dtype,
            "--policy": setting.policy,
            "--draft": setting.source,
            "--stages": options.stages,
            "--stage-seconds": options.stage_seconds,
            "--draft-seconds": options.draft_seconds,
            "--max-new-tokens": options.tokens,
            "--temperature": temperature,
            "--threads": 1,
        }
        arguments = [word for pair in words.items() for word in map(str, pair)]
        return run_prompts(arguments, [prompt.text for prompt in prompts])

    return answers


def virtual(options: argparse.Namespace) -> Engine:
    """The draft node with the token source, and stages that know the target's texts. A lookup is
    priced as free. Each prompt has a suffix tree of its own."""
    engine = VirtualEngine(Models(options.target), options.dtype)
    cost = ClusterCost(
        stage=StageCost(options.stage_seconds, PLATEAU),
        draft=DraftCost(options.draft_seconds),
        verdict_seconds=VERDICT_SECONDS,
        wire=LinkCost(LINK_SECONDS),
        width=engine.target.info.hidden_size,
    )
    texts: dict[Ask, tuple[int, ...]] = {}

    def answer(setting: Setting, ask: Ask) -> Mapping[str, Any]:
        if ask not in texts:
            texts[ask] = engine.target.write(ask)
        source = setting.source
        priced = Priced(setting.policy, source, options.stages, asked(cost, source))
        return {"token_ids": texts[ask], "stats": engine.measure(Cell(ask, priced), texts[ask])}

    def answers(setting: Setting, temperature: float, prompts: Sequence[Prompt]) -> Answers:
        sampling = Sampling(temperature=temperature)
        return [answer(setting, Ask(prompt, sampling, options.tokens)) for prompt in prompts]

    return answers


ENGINES: dict[str, Callable[[argparse.Namespace], Engine]] = {"real": real, "virtual": virtual}
