"""``python tools/bench node-time``: processor time of a node beside its engine, a pass.

Plain decoding on a cluster of this machine: one row a pass and stage. A stage's process has an
event loop (links, machine) on its main thread and a device thread for passes. The loop's processor
time is that thread's; what the device thread does outside llama.cpp, or beside products and
onnxruntime's graphs, is measured on such a stage in this process.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import psutil
from rich.console import Console
from rich.progress import Progress

from asyncspec.backend.base import StageSpec
from asyncspec.backend.reference import SESSION, chain
from asyncspec.backend.registry import DEFAULT, LLAMA, backend_name, backend_of
from asyncspec.core.jobs import Admit
from asyncspec.core.sampling import Sampling
from asyncspec_nodes.client.client import Client
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET, check_target
from asyncspec_nodes.cluster.config import DraftTable, TargetTable, even_split
from asyncspec_nodes.console.bounds import COUNT, Bounds
from asyncspec_nodes.local.cluster import LocalCluster, local_config
from asyncspec_protocol.messages import Finished, Submit
from tools.bench.options import SEVERAL, check_numbers

PROMPT = "Once upon a time there was a little girl who"


def add_arguments(parser: ArgumentParser) -> None:
    """The arguments of ``bench node-time``."""
    parser.add_argument("--target", default=str(BUNDLED_TARGET), metavar="DIR|GGUF")
    parser.add_argument("--stages", type=int, default=4, metavar="N")
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="of an answer")
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    parser.add_argument("--json", action="store_true")


def run(options: Namespace) -> int:
    """Measure and print."""
    check_numbers(options, stages=COUNT)
    info = check_target(options.target, options.stages)
    check_numbers(options, repeats=SEVERAL, tokens=Bounds(2, info.context_length - 64))
    figures = asyncio.run(_nodes(options))
    name = backend_name(options.target)
    if name == LLAMA:
        figures["ms_outside_llama_cpp"] = _outside(options, _llama_seconds)
    elif name == DEFAULT:
        figures["ms_beside_products"] = _outside(options, _product_seconds)
    if options.json:
        print(json.dumps(figures))
        return 0
    for name, value in figures.items():
        print(f"{name.replace('_', ' '):36} {value:.3f}")
    return 0


async def _nodes(options: Namespace) -> dict[str, float]:
    """Milliseconds a pass of stages' main threads (mean over stages, median over answers)."""
    target = TargetTable(path=str(options.target))
    draft = DraftTable(source="none", policy="autoregressive")
    config = local_config(target, draft, options.stages, 1)
    loops, passes, speeds = [], [], []
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(LocalCluster(config, lambda report: None))
        client = await Client.connect(*cluster.address, config.cluster.name)
        stack.push_async_callback(client.close)
        bar = stack.enter_context(Progress(console=Console(stderr=True)))
        task = bar.add_task("answers", total=options.repeats)
        await _ask(client, options)  # warm
        for _ in range(options.repeats):
            before = _main_seconds(cluster.pids)
            stats = await _ask(client, options)
            busy = _main_seconds(cluster.pids) - before
            loops.append(1e3 * busy / options.stages / stats["passes"])
            passes.append(1e3 * stats["stage_seconds"] / options.stages / stats["passes"])
            speeds.append(stats["tokens_per_second"])
            bar.advance(task)
    return {
        "ms_of_event_loop": statistics.median(loops),
        "ms_of_pass": statistics.median(passes),
        "tokens_per_second": statistics.median(speeds),
    }


def _main_seconds(pids: tuple[int, ...]) -> float:
    """Processor time of the verify stages' main threads; the draft node is the first process."""
    found = 0.0
    for pid in pids[1:]:
        threads = {thread.id: thread for thread in psutil.Process(pid).threads()}
        found += threads[pid].user_time + threads[pid].system_time
    return found


async def _ask(client: Client, options: Namespace) -> dict[str, float]:
    submit = Submit(0, PROMPT, options.tokens, 0, 0.0, 0, 1.0, ignore_eos=True)
    async for event in client.ask(submit):
        if isinstance(event, Finished):
            return dict(event.stats)
    raise AssertionError("an answer ends with Finished")


def _outside(options: Namespace, watch: Callable[[], AbstractContextManager[list[float]]]) -> float:
    """Milliseconds of the device thread outside what ``watch`` counts for a pass of one row, of a
    stage in the middle if there is one."""
    found = backend_of(options.target)
    model: Any = found.open(options.target)
    spans = even_split(model.info.layers, options.stages)
    first, last = spans[min(1, len(spans) - 1)]
    outside = []
    with watch() as inside:
        stage: Any = found.load(StageSpec(model, (first, last)))
        stage.run(Admit(SESSION, options.tokens + 1, Sampling()))
        for place in range(options.tokens):
            states = stage.noise(1) if first else None
            job = chain(SESSION, place, [1], states, (0,) if stage.has_head else ())
            begin, before = time.thread_time(), inside[0]
            stage.run(job)
            outside.append(time.thread_time() - begin - (inside[0] - before))
    return 1e3 * statistics.median(outside)


@contextmanager
def _llama_seconds() -> Iterator[list[float]]:
    """Counts the thread time in ``llama_decode`` of engines that are made inside, without the
    functions of ours that it calls."""
    from asyncspec.plugins.llama.passes import Engine

    seconds, decode, tensor = [0.0], Engine._decode, Engine._tensor

    def timed_decode(engine: Engine) -> int:
        begin = time.thread_time()
        code = decode(engine)
        seconds[0] += time.thread_time() - begin
        return code

    def timed_tensor(engine: Engine, *arguments: Any) -> bool:
        begin = time.perf_counter()  # a tenth of the price of the thread's clock
        on = tensor(engine, *arguments)
        seconds[0] -= time.perf_counter() - begin
        return on

    with patch.multiple(Engine, _decode=timed_decode, _tensor=timed_tensor):
        yield seconds


@contextmanager
def _product_seconds() -> Iterator[list[float]]:
    """Counts the thread time in products of torch's and FBGEMM's, and in onnxruntime's graphs."""
    from asyncspec.plugins.hf.kernels.cpu import linear, ort
    from asyncspec.plugins.hf.kernels.cpu.capabilities import HalfProduct
    from asyncspec.plugins.hf.kernels.cpu.half_precision import HalfLinear

    seconds = [0.0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            begin = time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                seconds[0] += time.thread_time() - begin

        return run

    compiled = ort.Graph.compile
    with (
        patch.object(HalfLinear, "parts", timed(HalfLinear.parts)),
        patch.object(HalfProduct, "write", timed(HalfProduct.write)),
        patch.object(linear, "product_of", timed(linear.product_of)),
        patch.object(ort.Graph, "compile", lambda *given: timed(compiled(*given))),
    ):
        yield seconds
