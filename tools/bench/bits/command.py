"""``python tools/bench bits``: whether a token drawn amid trees has the bits of one drawn alone, on
this CPU, with layers as published models have them (random weights) or with a checkpoint.

Every node tries its own stage when it starts, over few rows; this tries many
(docs/reference/exactness.md). Exit code 1 where a stage says "bitwise" and is not.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.progress import track

from asyncspec.backend.base import Guarantee, Quantize
from asyncspec_nodes.console.bounds import Bounds
from tools.bench.bits.compare import Compared, compare
from tools.bench.bits.shapes import PUBLISHED
from tools.bench.options import check_numbers
from tools.bench.selection import chosen_parts

TYPES: dict[str, tuple[str, Quantize]] = {
    "bfloat16": ("bfloat16", "none"),
    "float32": ("float32", "none"),
    "float16": ("float16", "none"),
    "int8": ("bfloat16", "int8"),
    "int4": ("bfloat16", "int4"),
}
"""What weights are stored as, and how a stage keeps them."""

_HEAD = "| model | type | says | positions | other bits | other token | seconds |\n"
_RULE = "| --- | --- | --- | ---: | ---: | ---: | ---: |\n"


class Result(Struct, frozen=True):
    """Of one model in one type."""

    model: str
    type: str
    guarantee: Guarantee
    compared: Compared
    seconds: float

    @property
    def lies(self) -> bool:
        """Whether it says what is not so."""
        return self.guarantee == "bitwise" and self.compared.bits > 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench bits``."""
    parser.add_argument("--models", help=f"some of {', '.join(PUBLISHED)}; default: all")
    parser.add_argument("--types", help=f"some of {', '.join(TYPES)}; default: all")
    parser.add_argument("--layers", type=int, default=2, help="of each model")
    parser.add_argument("--target", help="a checkpoint instead, as one stage in its own type")
    parser.add_argument("--device", default="cpu", help='as [target] device; default: "cpu"')
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Try and print."""
    check_numbers(options, layers=Bounds(1, 100))
    models = chosen_parts(options.models, PUBLISHED, "--models")
    types = chosen_parts(options.types, TYPES, "--types")
    if options.target:
        results = [result(options.target, options.target, device=options.device)]
    else:
        results = list(_published(models, types, options.layers, options.device))
    if options.json:
        sys.stdout.write(json.dumps(msgspec.to_builtins(results)) + "\n")
    else:
        sys.stdout.write(_HEAD + _RULE + "".join(map(_line, results)))
    return int(any(result.lies for result in results))


def _published(models: list[str], types: list[str], layers: int, device: str) -> Iterator[Result]:
    import torch

    cells = [(model, name) for model in models for name in types]
    for model, name in track(cells, "models", console=Console(stderr=True)):
        with tempfile.TemporaryDirectory(prefix="asyncspec-bits-") as folder:
            stored, quantize = TYPES[name]
            path = PUBLISHED[model].save(Path(folder), layers, getattr(torch, stored))
            yield result(model, path, quantize, device)


def result(
    model: str, path: str | Path, quantize: Quantize = "none", device: str = "cpu"
) -> Result:
    """Raises ``CheckpointError``."""
    from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
    from asyncspec.plugins.hf.kernels.device import find
    from asyncspec.plugins.hf.model.stage import load_stage

    start = time.monotonic()
    checkpoint = open_checkpoint(path)
    how = {"quantize": quantize, "device": find(device)}
    stage = load_stage(checkpoint, 0, checkpoint.info.layers, **how)  # type: ignore[arg-type]
    kept = checkpoint.info.dtype if quantize == "none" else quantize
    return Result(model, kept, stage.guarantee, compare(stage), time.monotonic() - start)


def _line(result: Result) -> str:
    found = result.compared
    return (
        f"| {result.model} | {result.type} | {result.guarantee} | {found.positions} | "
        f"{found.bits} | {found.tokens} | {result.seconds:.1f} |\n"
    )
