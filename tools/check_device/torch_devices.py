"""Checkpoints on one of torch's devices: guarantees, logits bit by bit, times of passes, and
checked runs of several stages that share the device."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct

from asyncspec.backend.base import Quantize
from asyncspec.core.errors import AsyncSpecError, first_line
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec.plugins.hf.kernels import device as devices
from asyncspec.plugins.hf.model.stage import HFStage, load_stage
from asyncspec_nodes.cluster.checkpoints import BUNDLED_DRAFT, BUNDLED_TARGET
from tools.bench.bits.compare import compare
from tools.bench.bits.shapes import PUBLISHED
from tools.check_device.pass_times import pass_seconds
from tools.check_device.runs import checked_run

KINDS: tuple[tuple[str, Quantize], ...] = (
    ("bfloat16", "none"),
    ("float16", "none"),
    ("float32", "none"),
    ("bfloat16", "int8"),
    ("bfloat16", "int4"),
)
"""What layers compute in, and how their weights are kept."""

CELLS = (
    (1, "autoregressive"),
    (2, "flow"),
    (3, "flow"),
    (3, "flowspec"),
    (3, "specpipe"),
)
"""Numbers of stages on the device, and policies, of checked runs."""

_CONTEXT, _REPEATS = 256, 7


class OneKind(Struct):
    """A few layers on a device. ``problems``: a sentence for all that failed."""

    model: str
    device: str
    kind: str
    weights: str = ""
    guarantee: str = ""
    # Numbers of rows that passes are padded to.
    buckets: tuple[int, ...] = ()
    # Whether layers are captured graphs, or why they are not.
    graphs: str = ""
    # Of the positions that were tried, those whose logits have other bits amid trees than alone,
    # and those with another likeliest token.
    positions: int = 0
    other_bits: int = 0
    other_tokens: int = 0
    # Medians, by rows, in milliseconds: in exact and in fast mode.
    exact_ms: dict[int, float] = {}
    fast_ms: dict[int, float] = {}
    problems: list[str] = []


class Run(Struct):
    """A checked run of the bundled models."""

    device: str
    stages: int
    policy: str
    tokens_per_second: float = 0.0
    guarantee: str = ""
    equal: bool = False
    problem: str = ""

    @property
    def good(self) -> bool:
        """It ran, and its text is equal where the guarantee says so."""
        return not self.problem and (self.equal or self.guarantee != "bitwise")


def machine() -> str:
    """torch and what it finds."""
    found = [devices.find(name) for name in devices.names()]
    known = []
    for one in found:
        memory = one.memory()
        free = "" if memory is None else f", {memory.free / 2**30:.1f} GiB free"
        known.append(f"{one.description}{free}")
    built = torch.version.cuda or getattr(torch.version, "hip", None) or "no CUDA"
    return f"torch {torch.__version__} ({built}); devices: {'; '.join(known) or 'the CPU alone'}"


def measure(model: str, layers: int, device: str, kinds: Sequence[Any] = KINDS) -> list[OneKind]:
    """Random layers of a published model's shape, and its head."""
    found = []
    for dtype, quantize in kinds:
        one = OneKind(model, device, dtype if quantize == "none" else quantize)
        found.append(one)
        with tempfile.TemporaryDirectory(prefix="asyncspec-device-") as folder:
            path = PUBLISHED[model].save(Path(folder), layers, getattr(torch, dtype))
            try:
                _measure(one, path, dtype, quantize)
            # What a driver or a library of a device raises has no common class.
            except (AsyncSpecError, RuntimeError, AssertionError) as error:
                one.problems.append(first_line(error))
    return found


def _measure(one: OneKind, path: Path, dtype: str, quantize: Quantize) -> None:
    checkpoint, device = open_checkpoint(path), devices.find(one.device)
    how: Any = {"dtype": dtype, "quantize": quantize, "device": device}
    stage = load_stage(checkpoint, 0, checkpoint.info.layers, **how)
    one.weights, one.guarantee = stage.weights, stage.guarantee
    one.buckets, compared = stage.settings.buckets, compare(stage)
    one.positions, one.other_bits = compared.positions, compared.bits
    one.other_tokens = compared.tokens
    if one.guarantee == "bitwise" and one.other_bits:
        one.problems.append(f"{one.other_bits} positions have other bits, and it says bitwise")
    one.exact_ms = _milliseconds(stage)
    one.graphs = _graphs(stage)
    del stage
    fast = load_stage(checkpoint, 0, checkpoint.info.layers, mode="fast", **how)
    one.fast_ms = _milliseconds(fast)


def _milliseconds(stage: HFStage) -> dict[int, float]:
    return {n: 1e3 * took for n, took in pass_seconds(stage, _CONTEXT, _REPEATS).items()}


def _graphs(stage: HFStage) -> str:
    graphs = stage.shard.graphs
    if graphs is None:
        return "no" if stage.shard.device.is_accelerator else ""
    return f"no: {graphs.failure}" if graphs.failure else "yes"


def run_clusters(device: str) -> list[Run]:
    """Of the bundled target and draft, all of whose stages are on the device."""
    found = []
    for stages, policy in CELLS:
        answer = checked_run(BUNDLED_TARGET, BUNDLED_DRAFT, device, policy, stages)
        if isinstance(answer, str):
            found.append(Run(device, stages, policy, problem=answer))
            continue
        stats = answer["stats"]
        found.append(
            Run(
                *(device, stages, policy, stats["tokens_per_second"]),
                guarantee=answer["guarantee"],
                equal=answer["check"]["equal"],
            )
        )
    return found


def table(kinds: Sequence[OneKind], runs: Sequence[Run]) -> str:
    """As Markdown; then what failed."""
    rows = sorted({n for one in kinds for n in (*one.exact_ms, *one.fast_ms)})
    heads = ["model", "device", "type", "guarantee", "other bits", "rows padded to", "graphs"]
    lines = [_row([*heads, *(f"{n} rows, exact / fast ms" for n in rows)])]
    lines.append(_row(["---"] * (len(heads) + len(rows))))
    for one in kinds:
        cells = [one.model, one.device, one.kind, one.guarantee or "-"]
        cells.append(f"{one.other_bits} of {one.positions}")
        cells += [", ".join(map(str, one.buckets)) or "-", one.graphs or "-"]
        cells += [f"{_ms(one.exact_ms, n)} / {_ms(one.fast_ms, n)}" for n in rows]
        lines.append(_row(cells))
    lines += [f"- {one.kind}: {one.weights}" for one in kinds if one.weights]
    lines += [f"- {x.model} in {x.kind} on {x.device}: {why}" for x in kinds for why in x.problems]
    lines += ["", _row(["device", "stages", "policy", "tokens/s", "guarantee", "texts equal"])]
    lines.append(_row(["---"] * 6))
    for run in runs:
        speed, equal = f"{run.tokens_per_second:.1f}", "yes" if run.equal else "no"
        said = [run.device, str(run.stages), run.policy, speed, run.guarantee or "-", equal]
        lines.append(_row(said))
    lines += [
        f"- {run.policy} on {run.stages} stages: {run.problem}" for run in runs if run.problem
    ]
    return "\n".join(lines)


def _ms(times: dict[int, float], rows: int) -> str:
    return f"{times[rows]:.2f}" if rows in times else "-"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
