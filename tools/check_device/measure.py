"""One GGUF model on one device: its guarantee, the times of its passes, and a checked run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from msgspec import Struct

from asyncspec.backend.base import EngineOptions
from asyncspec.backend.llama.stage import LlamaStage, load_stage
from asyncspec.backend.llama.target import open_target
from asyncspec.core.errors import AsyncSpecError

PROMPT = "Once upon a time there was a little fox who"
POLICIES = ("autoregressive", "flowspec")
_TOKENS = 64
_RUN_SECONDS = 900.0


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
        answer = _run(target, draft, device, policy)
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


def _run(target: Path, draft: Path | None, device: str, policy: str) -> dict[str, Any] | str:
    """The answer of ``asyncspec run --check``; or why there is none."""
    argv = ["run", "--target", str(target), "--device", device, "--stages", "2", "--no-chat"]
    argv += ["--draft", "ngram" if draft is None else str(draft), "--policy", policy]
    argv += ["--prompt", PROMPT, "--max-new-tokens", str(_TOKENS), "--check", "--json"]
    command = [sys.executable, "-P", "-m", "asyncspec_nodes.cli.main", *argv]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_RUN_SECONDS)
        answer: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return f"no answer within {_RUN_SECONDS:g} s"
    except ValueError:
        return (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
    return answer
