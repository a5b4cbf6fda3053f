"""One GGUF model on one device: its guarantee, the times of its passes, and a checked run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from msgspec import Struct

from asyncspec.backend.base import EngineOptions
from asyncspec.core.errors import AsyncSpecError
from asyncspec.plugins.llama.stage import LlamaStage, load_stage
from asyncspec.plugins.llama.target import open_target
from tools.check_device.runs import checked_run

POLICIES = ("autoregressive", "flowspec")
_STAGES = 2


class Measured(Struct):
    """What one model does on one device. ``problems``: a sentence for all that failed."""

    model: str
    device: str
    weights: str = ""
    guarantee: str = ""
    # Of a pass of the whole model, by its rows, in milliseconds.
    pass_ms: dict[int, float] = {}
    # Of a pass outside llama.cpp, in milliseconds of the thread.
    python_ms: float = 0.0
    # By policy, and whether the text was the sequential decoder's.
    tokens_per_second: dict[str, float] = {}
    equal: dict[str, bool] = {}
    problems: list[str] = []

    @property
    def good(self) -> bool:
        """Nothing failed, and texts are equal where the guarantee says so."""
        promised = self.guarantee != "bitwise" or all(self.equal.values())
        return promised and not self.problems


def measure(target: Path, draft: Path | None, device: str) -> Measured:
    """Load the whole model in this process, then run it in two stages of their own."""
    found = Measured(target.name, device)
    try:
        opened = open_target(target)
        options = EngineOptions(device=device)
        stage = load_stage(opened, 0, opened.info.layers, options=options)
    except AsyncSpecError as error:
        found.problems.append(str(error))
        return found
    found.weights, found.guarantee = stage.weights, stage.guarantee
    found.pass_ms, found.python_ms = pass_times(stage)
    del stage
    for policy in POLICIES:
        answer = checked_run(target, draft, device, policy, _STAGES)
        if isinstance(answer, str):
            found.problems.append(f"{policy}: {answer}")
            continue
        found.tokens_per_second[policy] = answer["stats"]["tokens_per_second"]
        found.equal[policy] = answer["check"]["equal"]
    return found


def pass_times(stage: LlamaStage) -> tuple[dict[int, float], float]:
    """Of passes by their rows, and outside llama.cpp (of the thread), in milliseconds."""
    spent = {"run": 0.0, "decode": 0.0}
    calls = 0
    run, decode = stage.run, stage.engine._decode

    def timed_run(job: Any) -> object:
        start = time.thread_time()
        try:
            return run(job)
        finally:
            spent["run"] += time.thread_time() - start

    def timed_decode() -> int:
        nonlocal calls
        calls += 1
        start = time.thread_time()
        try:
            return decode()
        finally:
            spent["decode"] += time.thread_time() - start

    stage.run, stage.engine._decode = timed_run, timed_decode  # type: ignore[method-assign]
    seconds = stage.pass_seconds()
    stage.run, stage.engine._decode = run, decode  # type: ignore[method-assign]
    python = (spent["run"] - spent["decode"]) / max(1, calls)
    return {rows: 1e3 * took for rows, took in seconds.items()}, 1e3 * python
