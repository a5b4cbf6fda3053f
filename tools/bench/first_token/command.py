"""``python tools/bench prompts``: seconds to the first token of long prompts, next to the engine
alone (transformers, llama.cpp), with as many threads as our stages together, interleaved.

Every row is one reader: the engine alone, and clusters of stages with a thread each. ``ratio``:
that of prompt tokens a second to the engine alone with as many threads, within one repeat. A target
is a checkpoint or a GGUF file; without one it is the bundled target enlarged to 16 layers of width
768.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

import msgspec
import torch
from msgspec.structs import replace
from rich.console import Console
from rich.progress import Progress

from asyncspec.backend.base import DEFAULT_OPTIONS
from asyncspec.backend.registry import LLAMA, backend, backend_name
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.console.bounds import COUNT, Bounds
from tools.bench.enlarge import Size, enlarge, longer_context
from tools.bench.first_token.measure import Row, Setting, context, measure
from tools.bench.options import check_numbers, print_rows

SIZE = Size(hidden=768, feed_forward=2304, layers=16)
LENGTHS, FULL_LENGTHS = [512, 2048], [512, 2048, 8192]
STAGES, FULL_STAGES = [1, 2], [1, 2, 4]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench prompts``."""
    parser.add_argument("--target", action="append", type=Path, metavar="PATH", help="may repeat")
    parser.add_argument("--dtype", action="append", choices=["fp32", "bf16"], help="may repeat")
    parser.add_argument("--mode", choices=["exact", "fast"], default="exact", help="of the stages")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="N", help="tokens of prompts")
    parser.add_argument("--stages", type=int, nargs="+", metavar="N")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument(
        "--beside",
        type=int,
        default=0,
        metavar="N",
        help="read one more prompt beside a stream of N tokens, and say how much it is held up",
    )
    parser.add_argument("--full", action="store_true", help="also 8,192 tokens, and four stages")
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Raises ``AsyncSpecError``."""
    check_numbers(options, repeats=COUNT, beside=Bounds(0, 100_000))
    lengths = options.lengths or (FULL_LENGTHS if options.full else LENGTHS)
    stages = options.stages or (FULL_STAGES if options.full else STAGES)
    check_numbers(argparse.Namespace(lengths=lengths, stages=stages), lengths=COUNT, stages=COUNT)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="asyncspec-prompts-") as folder:
        targets = options.target or [_enlarged(Path(folder), context(lengths, options.beside))]
        settings = [
            setting
            for target in targets
            for setting in _settings(options, target, tuple(lengths), tuple(stages))
        ]
        with Progress(console=Console(stderr=True)) as progress:
            for setting in settings:
                task = progress.add_task(f"{setting.target.name} {setting.dtype}", total=None)
                rows += asyncio.run(
                    measure(setting, lambda text, t=task: progress.update(t, description=text))  # type: ignore[misc]
                )
                progress.update(task, total=1, completed=1)
    print_rows(options, [msgspec.to_builtins(row) for row in rows])
    return 0


def _settings(
    options: argparse.Namespace, target: Path, lengths: tuple[int, ...], stages: tuple[int, ...]
) -> list[Setting]:
    """One for each dtype of a checkpoint. Raises ``UserError`` or ``CheckpointError``."""
    name = str(target)
    kind = backend_name(name)
    vocab = backend(kind).inspect(name).vocab_size
    setting = Setting(
        target, vocab, "auto", options.mode, lengths, stages, options.repeats, options.beside
    )
    if kind != LLAMA:
        return [replace(setting, dtype=dtype) for dtype in options.dtype or ("fp32", "bf16")]
    from asyncspec.plugins.llama.target import open_target
    from asyncspec.plugins.llama.trial import repacks

    opened = open_target(target)
    layers = (0, opened.info.layers)
    return [replace(setting, repacked=repacks(opened, layers, "fast", DEFAULT_OPTIONS))]


def _enlarged(folder: Path, positions: int) -> Path:
    wide, long = folder / "wide", folder / "enlarged"
    for made in (wide, long):
        made.mkdir()
    enlarge(BUNDLED_TARGET, wide, SIZE, torch.bfloat16)
    return longer_context(long, positions, wide)
