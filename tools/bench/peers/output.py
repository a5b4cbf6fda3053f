"""The comparison as Markdown and as one JSON object."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from tools.bench.peers.comparison import LIKE, Comparison
from tools.bench.peers.generate import BASE
from tools.bench.peers.measure import Found

COLUMNS = ("peer", "cores", "ratio", "least", "most", "tokens/s")


def as_json(comparison: Comparison, found: Found, nbytes: int | None) -> dict[str, Any]:
    """``nbytes``: of the enlarged target's weights."""
    return {
        "base": BASE,
        "peers": msgspec.to_builtins(found.standings),
        "about": about(comparison, nbytes),
        "notes": list(found.notes),
    }


def as_markdown(comparison: Comparison, found: Found, nbytes: int | None) -> str:
    """What was compared, the table, what does not hold."""
    lines = [f"- {line}" for line in about(comparison, nbytes)]
    lines += ["", f"| {' | '.join(COLUMNS)} |", "| --- |" + " ---: |" * (len(COLUMNS) - 1)]
    for one in found.standings:
        cores = "-" if one.cores is None else f"{one.cores:g}"
        ratios = (f"{ratio:.2f}" for ratio in (one.ratio, one.least, one.most))
        cells = (one.name, cores, *ratios, f"{one.tokens_per_second:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *([""] if found.notes else []), *(f"- {n}" for n in found.notes)])


def about(comparison: Comparison, nbytes: int | None) -> list[str]:
    """What was compared and where, a line each."""
    models = f"target {comparison.target.name}, draft {comparison.draft.name}"
    weights = "" if comparison.quantize == "none" else f", weights in {comparison.quantize}"
    models += (
        f"; ours in {comparison.mode} mode, in {comparison.dtype}{weights} on {comparison.device}, "
        "generate in float32"
    )
    if comparison.size is not None and nbytes is not None:
        size = comparison.size
        models += (
            f"; the target enlarged to hidden size {size.hidden}, feed-forward width "
            f"{size.feed_forward}, {size.layers} layers ({nbytes / 2**20:.0f} MiB): it does the "
            "work of that size and says what it said before"
        )
    if comparison.llama_cpp is not None:
        models += f"; on llama.cpp weights as {comparison.gguf}"
    late = comparison.latency_ms
    latency = f" with {late:g} ms from any device to any other" if late else ""
    if comparison.stage_seconds:
        latency += f", {comparison.stage_seconds:g} s a pass of a stage"
    return [
        models,
        f"ours: {comparison.devices} devices of {comparison.cpu:g} cores on the network of {LIKE}"
        f"{latency}, {comparison.all_cores:g} cores together; generate: one device of "
        f"{comparison.cpu:g} and one of {comparison.all_cores:g} cores",
        f"ratio: to {BASE}, by tokens/s of whole answers (prompt included), median, least and most "
        f"of {comparison.repeats} repeats; {len(comparison.prompts)} prompts, "
        f"{comparison.tokens} new tokens, greedy; peers took turns",
        machine(),
    ]


def machine() -> str:
    """This machine and the versions that matter."""
    versions = " ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return f"{platform.system()}, {os.cpu_count()} x {_processor()}; {versions}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
