"""``python tools/bench quantised``: a stage's pass, memory and answers with int8 and int4 weights.

One stage of random weights in the shape of a real model's layers, kept in each way, in this very
process: passes of some rows are interleaved over the ways, medians of CPU time on one thread (so
that whoever shares the cores does not count), and ratios to bfloat16. Quantised ones are multiplied
by onnxruntime where it does that, and by torch. Peak memory (Linux) is that of a process of its own
that loads the stage. The error of one layer is that of random weights, and of rows some of whose
numbers are larger than the others. With ``--text`` also what rounding does to the bundled target on
a text: perplexity, and how often the likeliest token stays.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec
from msgspec import Struct

from asyncspec.core.errors import UserError
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.console.bounds import COUNT, Bounds
from tools.bench.options import check_numbers
from tools.bench.random_model import save_random

if TYPE_CHECKING:
    import torch

    from asyncspec.plugins.hf.model.stage import HFStage

ROWS = (1, 4, 16, 64)
KERNELS = ("onnxruntime", "torch")
"""Of quantised weights. Where onnxruntime's are not used, both are torch's."""

WAYS = (
    ("float32", "none", "torch"),
    ("bfloat16", "none", "torch"),
    *(("bfloat16", quantize, kernel) for quantize in ("int8", "int4") for kernel in KERNELS),
)
BASE = WAYS[1]
WINDOW = 256
"""Tokens of a text that are read at a time."""

HEAD = 64
"""Width of an attention head."""

POSITIONS = 8192
"""What the random model is made for."""

WIDTHS = Bounds(HEAD, 1 << 16)
LAYERS = Bounds(1, 1000)

OUTLIERS = (1, 10, 100)
"""How much larger one in ``OUTLIER_SHARE`` numbers of a row is."""

OUTLIER_SHARE = 128

_CHILD = """
import sys, torch
torch.set_num_threads(1)
from tools.bench.quantised import load
load(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
lines = open("/proc/self/status").read().splitlines()
print(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")))
"""


class Way(Struct, frozen=True):
    """What was measured of one way to keep weights."""

    dtype: str
    quantize: str
    kernels: str
    weight_bytes: int
    bytes_per_weight: float
    peak_bytes: int
    load_seconds: float
    # Median CPU seconds of a pass by its rows, and its ratio to dense bfloat16's.
    seconds: dict[int, float]
    ratios: dict[int, float]


class LayerError(Struct, frozen=True):
    """Error of a linear layer, as a share of the results' norm, by the size of ``OUTLIERS``."""

    quantize: str
    kernels: str
    errors: dict[int, float]


class TextQuality(Struct, frozen=True):
    """Perplexity and agreement of a quantised target on a text, next to the float32 one."""

    quantize: str
    kernels: str
    perplexity: float
    agreement: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench quantised``."""
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=5632)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--context", type=int, default=256, help="committed tokens before the rows")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--text", type=Path, help="to read with the bundled target")
    parser.add_argument("--windows", type=int, default=16, help=f"of {WINDOW} tokens of the text")
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    check_numbers(
        options,
        hidden=WIDTHS,
        inner=WIDTHS,
        layers=LAYERS,
        context=Bounds(1, POSITIONS - max(ROWS)),
        repeats=COUNT,
        windows=COUNT,
    )
    if options.hidden % HEAD:
        raise UserError(f"--hidden is {options.hidden}; it must be a multiple of {HEAD}")
    windows = [] if options.text is None else _windows(options)
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint(Path(folder), options)
        ways = measure(path, options)
    errors = layer_errors(options.hidden)
    qualities = read_text(windows) if windows else []
    if options.json:
        parts = {"ways": ways, "errors": errors, "text": qualities}
        sys.stdout.write(json.dumps(msgspec.to_builtins(parts)) + "\n")
    else:
        _print(ways, errors, qualities)
    return 0


def make_checkpoint(folder: Path, options: argparse.Namespace) -> Path:
    """One of random bfloat16 weights."""
    import torch
    from transformers import LlamaConfig

    heads = options.hidden // HEAD
    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=options.inner,
        # One more: the measured stage has neither norm nor head.
        num_hidden_layers=options.layers + 1,
        num_attention_heads=heads,
        num_key_value_heads=1 if heads % 4 else heads // 4,
        vocab_size=256,
        max_position_embeddings=POSITIONS,
    )
    return save_random(config, folder, torch.bfloat16)


def measure(path: Path, options: argparse.Namespace) -> list[Way]:
    """All ways, their passes interleaved."""
    loaded = [load(path, options.layers, *way) for way in WAYS]
    passes = [_ready(stage, options.context) for stage, _ in loaded]
    tries: list[dict[int, list[float]]] = [{rows: [] for rows in ROWS} for _ in WAYS]
    for repeat in range(options.repeats + 1):
        for rows in ROWS:
            for one_pass, found in zip(passes, tries, strict=True):
                seconds = one_pass(rows)
                if repeat:  # the first round warms up
                    found[rows].append(seconds)
    medians = [{rows: statistics.median(x) for rows, x in found.items()} for found in tries]
    base = medians[WAYS.index(BASE)]
    return [
        _way(path, options.layers, way, *kept, seconds, base)
        for way, kept, seconds in zip(WAYS, loaded, medians, strict=True)
    ]


@contextmanager
def using(kernels: str) -> Iterator[None]:
    """Inside, stages are loaded with these ``KERNELS``."""
    from asyncspec.plugins.hf.kernels.cpu import nbits

    found = nbits.multiplies_levels() and kernels == KERNELS[0]
    with mock.patch.object(nbits, "multiplies_levels", return_value=found):
        yield


def load(
    path: str | Path, layers: int, dtype: str, quantize: Any, kernels: str
) -> tuple[HFStage, float]:
    """The first layers as a stage, and how many seconds that took."""
    from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
    from asyncspec.plugins.hf.model.stage import load_stage

    start = time.perf_counter()
    with using(kernels):
        stage = load_stage(open_checkpoint(path), 0, layers, dtype=dtype, quantize=quantize)
    return stage, time.perf_counter() - start


def _ready(stage: HFStage, context: int) -> Callable[[int], float]:
    """A pass of some siblings below a context that was read, in seconds."""
    from asyncspec.core.jobs import Admit, Forward, Row
    from asyncspec.core.sampling import Sampling
    from asyncspec_protocol.ids import SegmentId, SessionId

    session = SessionId(0)
    stage.run(Admit(session, context + max(ROWS), Sampling()))

    def one_pass(rows: int, start: int = context) -> float:
        nodes = tuple(Row(start + i, start, (start + i,)) for i in range(rows))
        job = Forward(session, SegmentId(0), start, nodes, tokens=(1,) * rows)
        begin = time.thread_time()
        stage.run(job)
        return time.thread_time() - begin

    one_pass(context, 0)
    return one_pass


def _way(
    path: Path,
    layers: int,
    way: tuple[str, str, str],
    stage: HFStage,
    load_seconds: float,
    seconds: dict[int, float],
    base: dict[int, float],
) -> Way:
    from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
    from asyncspec.plugins.hf.model.weights import read_shard_tensors

    tensors = read_shard_tensors(open_checkpoint(path), 0, layers, stage.shard.dtype)
    weights = sum(tensors.weight_counts().values())
    argv = [sys.executable, "-c", _CHILD, str(path), str(layers), *way]
    peak = int(subprocess.run(argv, check=True, capture_output=True).stdout)
    return Way(
        dtype=way[0],
        quantize=way[1],
        kernels=way[2],
        weight_bytes=stage.shard.weight_bytes,
        bytes_per_weight=sum(x.weight_bytes for x in stage.shard.linears) / weights,
        peak_bytes=peak,
        load_seconds=load_seconds,
        seconds=seconds,
        ratios={rows: seconds[rows] / base[rows] for rows in ROWS},
    )


def layer_errors(width: int) -> list[LayerError]:
    """Of a square matrix of normal weights, for rows with and without outliers."""
    import torch

    from asyncspec.plugins.hf.kernels.cpu.nbits import quantized_linear
    from asyncspec.plugins.hf.kernels.cpu.ort import WaitingLinear
    from asyncspec.plugins.hf.kernels.probing import noise

    weight, rows = noise(width, width), noise(max(ROWS), width, seed=1)
    found: list[LayerError] = []
    for _, quantize, kernels in WAYS[2:]:
        bits = int(quantize.removeprefix("int"))
        with using(kernels):
            read = partial(_rows, weight)
            linear = quantized_linear("layer", bits, (width, width), read, torch.float32, None)
            linear = linear.pack() if isinstance(linear, WaitingLinear) else linear
        errors = {}
        for size in OUTLIERS:
            x = rows.clone()
            x[:, ::OUTLIER_SHARE] *= size
            want = x @ weight.T
            errors[size] = float((linear(x) - want).norm() / want.norm())
        found.append(LayerError(quantize, kernels, errors))
    return found


def _rows(weight: torch.Tensor, first: int, end: int) -> torch.Tensor:
    return weight[first:end]


def _windows(options: argparse.Namespace) -> list[tuple[int, ...]]:
    """The tokens of a text, by the window. Raises ``UserError``."""
    from asyncspec.plugins.hf.checkpoint.tokenizer import load_tokenizer

    try:
        text = options.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text: {options.text} cannot be read: {error}") from None
    tokens = load_tokenizer(BUNDLED_TARGET).encode(text)[: options.windows * WINDOW]
    if len(tokens) < 2:
        raise UserError(f"--text: {options.text} is too short; it must have two tokens")
    return [tokens[i : i + WINDOW] for i in range(0, len(tokens) - 1, WINDOW)]


def read_text(windows: Sequence[Sequence[int]]) -> list[TextQuality]:
    """Perplexity of a text, and how often the likeliest token is float32's."""
    import torch

    from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint

    layers = open_checkpoint(BUNDLED_TARGET).info.layers
    qualities: list[TextQuality] = []
    likeliest: list[torch.Tensor] = []
    for _, quantize, kernels in (WAYS[0], *WAYS[2:]):
        stage, _ = load(BUNDLED_TARGET, layers, "float32", quantize, kernels)
        with torch.inference_mode():
            logits = [_logits(stage, window) for window in windows]
        best = [x.argmax(-1) for x in logits]
        likeliest = likeliest or best
        losses = [
            torch.nn.functional.cross_entropy(x[:-1], torch.tensor(window[1:]), reduction="none")
            for x, window in zip(logits, windows, strict=True)
        ]
        same = torch.cat([a == b for a, b in zip(best, likeliest, strict=True)])
        perplexity = float(torch.cat(losses).mean().exp())
        qualities.append(TextQuality(quantize, kernels, perplexity, float(same.float().mean())))
    return qualities


def _logits(stage: HFStage, tokens: Sequence[int]) -> Any:
    """[n, vocab], each row before its token is followed by the next."""
    import torch

    from asyncspec.core.jobs import Row
    from asyncspec.plugins.hf.attention.attention import FastAttention
    from asyncspec.plugins.hf.attention.cache import KVCache

    count = len(tokens)
    rows = [Row(i, i, tuple(range(i + 1))) for i in range(count)]
    tree = FastAttention(KVCache(stage.shard.cache_shape("fast"), count), 0, rows)
    places = torch.arange(count)
    return stage.shard.logits(torch.tensor(tokens), places, tree, places)


def _print(ways: list[Way], errors: list[LayerError], qualities: list[TextQuality]) -> None:
    heads = "".join(f" {rows} rows, ms | ratio |" for rows in ROWS)
    out = [f"| weights | bytes a weight | peak MiB | load s |{heads}"]
    out.append("| --- |" + " ---: |" * (3 + 2 * len(ROWS)))
    for way in ways:
        cells = "".join(f" {1e3 * way.seconds[n]:.2f} | {way.ratios[n]:.2f} |" for n in ROWS)
        name = way.dtype if way.quantize == "none" else f"{way.quantize}, {way.kernels}"
        out.append(
            f"| {name} | {way.bytes_per_weight:.2f} | {way.peak_bytes / 2**20:.0f} | "
            f"{way.load_seconds:.1f} |{cells}"
        )
    out += ["", "| a layer |" + "".join(f" outliers x {size} |" for size in OUTLIERS)]
    out.append("| --- |" + " ---: |" * len(OUTLIERS))
    for one in errors:
        cells = "".join(f" {one.errors[size]:.2%} |" for size in OUTLIERS)
        out.append(f"| {one.quantize}, {one.kernels} |{cells}")
    if qualities:
        out += ["", "| target | perplexity | same likeliest token |", "| --- | ---: | ---: |"]
        out += [
            f"| {one.quantize}, {one.kernels} | {one.perplexity:.3f} | {one.agreement:.2%} |"
            for one in qualities
        ]
    sys.stdout.write("\n".join(out) + "\n")
