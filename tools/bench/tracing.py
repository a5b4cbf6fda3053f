"""``python tools/bench tracing``: what recording costs, as a ratio within one run.

One cluster, one prompt, asked again and again in the order without, with, with, without; every
such quartet gives one ratio of decoding times, and one of the CPU time of all nodes, which other
work on the machine disturbs less. So drift of the machine cancels out.

Where that is still too noisy for a small difference, there is the cost itself: all steps of one
traced run are recorded and encoded once more, by the clock, and compared with its decoding time.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from asyncspec.core.errors import UserError
from asyncspec.trace.file import TraceWriter, read_trace
from asyncspec.trace.recorder import Recorder
from asyncspec.trace.records import ENCODER, NodeRecord, Record, Step
from asyncspec_nodes.client.client import Client
from asyncspec_nodes.client.trace_download import TraceDownload
from asyncspec_nodes.cluster.checkpoints import BUNDLED_DRAFT, BUNDLED_TARGET, check_target
from asyncspec_nodes.cluster.config import Config, DraftTable, TargetTable
from asyncspec_nodes.console.bounds import COUNT, Bounds
from asyncspec_nodes.local.cluster import LocalCluster, local_config
from asyncspec_nodes.simulation.replay import Player
from asyncspec_protocol.messages import Finished, Submit
from tools.bench.limits.cpu_time import cpu_seconds
from tools.bench.options import SEVERAL, check_numbers

PROMPT = "Once upon a time there was a little girl who"


def add_arguments(parser: ArgumentParser) -> None:
    """The arguments of ``bench tracing``."""
    parser.add_argument("--quartets", type=int, default=10)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--json", action="store_true")


def run(options: Namespace) -> int:
    """Measure and print."""
    check_numbers(options, quartets=SEVERAL, stages=COUNT)
    model_info = check_target(BUNDLED_TARGET, options.stages)
    check_numbers(options, max_new_tokens=Bounds(2, model_info.context_length))
    times, work, lines = asyncio.run(_measure(options))
    shares = asyncio.run(_shares(options))
    figures = {
        "quartets": len(times),
        "events_per_token": lines / (2 * len(times) * options.max_new_tokens),
        "decoding_time": _quartiles(times),
        "cpu_time": _quartiles(work),
        "share_of_decoding_time_by_rank": shares,
    }
    if options.json:
        print(json.dumps(figures))
        return 0
    print(f"{figures['quartets']} quartets, {figures['events_per_token']:.1f} events a token")
    for name in ("decoding_time", "cpu_time"):
        low, middle, high = figures[name]
        title = f"{name.replace('_', ' ')} with a trace / without"
        print(f"{title:38} {middle:.4f} (quartiles {low:.4f} to {high:.4f})")
    ranks = ", ".join(f"rank {rank} {share:.2%}" for rank, share in enumerate(shares))
    print(f"recording and encoding alone, of decoding time: {ranks}")
    return 0


def _quartiles(ratios: list[float]) -> list[float]:
    return statistics.quantiles(ratios, n=4)


def _config(options: Namespace, *, traced: bool) -> Config:
    target, draft = TargetTable(path=str(BUNDLED_TARGET)), DraftTable(source=str(BUNDLED_DRAFT))
    return local_config(target, draft, options.stages, 1, traced=traced)


async def _measure(options: Namespace) -> tuple[list[float], list[float], int]:
    config = _config(options, traced=False)
    times: list[float] = []
    work: list[float] = []
    lines = 0
    with tempfile.TemporaryDirectory() as folder, Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("quartets", total=options.quartets)
        async with AsyncExitStack() as stack:
            cluster = await stack.enter_async_context(LocalCluster(config, lambda report: None))
            client = await Client.connect(*cluster.address, config.cluster.name)
            stack.push_async_callback(client.close)
            await _ask(client, options)  # warm
            for _ in range(options.quartets):
                seconds = {False: 0.0, True: 0.0}
                busy = {False: 0.0, True: 0.0}
                for traced in (False, True, True, False):
                    async with AsyncExitStack() as recording:
                        if traced:
                            writer = TraceWriter(Path(folder) / "trace")
                            collector = TraceDownload(client, writer, last=0.0)
                            await recording.enter_async_context(collector)
                        before = sum(map(cpu_seconds, cluster.pids))
                        seconds[traced] += await _ask(client, options)
                    # Recording ends with the delivery of the last events.
                    busy[traced] += sum(map(cpu_seconds, cluster.pids)) - before
                    lines += collector.lines if traced else 0
                if not busy[False]:
                    short = f"--max-new-tokens is {options.max_new_tokens}"
                    raise UserError(f"{short}; so short an answer takes no time that is counted")
                times.append(seconds[True] / seconds[False])
                work.append(busy[True] / busy[False])
                bar.advance(task)
    return times, work, lines


async def _shares(options: Namespace) -> list[float]:
    """By rank: seconds that recording and encoding a run took, of its decoding time."""
    config = _config(options, traced=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        async with AsyncExitStack() as stack:
            cluster = await stack.enter_async_context(LocalCluster(config, lambda report: None))
            client = await Client.connect(*cluster.address, config.cluster.name)
            stack.push_async_callback(client.close)
            await stack.enter_async_context(TraceDownload(client, TraceWriter(path), last=-1.0))
            seconds = await _ask(client, options)
        lines = read_trace(path).lines
    nodes = [line for line in lines if isinstance(line, NodeRecord)]
    return [_once_more(node, lines) / seconds for node in sorted(nodes, key=lambda n: n.rank)]


def _once_more(node: NodeRecord, lines: Sequence[Record]) -> float:
    """The least of some tries, in seconds."""
    steps = [line for line in lines if isinstance(line, Step) and line.rank == node.rank]
    player = Player(node)
    pairs = [player.feed(step)[:2] for step in steps]
    tries = []
    for _ in range(5):
        recorder = Recorder(node)
        start = time.perf_counter()
        for event, effects in pairs:
            recorder.stepped(event, effects, [0] * len(effects), 0.0, 0.0)
        records, _ = recorder.read(0, len(pairs))
        ENCODER.encode_lines(records)
        tries.append(time.perf_counter() - start)
    return min(tries)


async def _ask(client: Client, options: Namespace) -> float:
    """Seconds of decoding."""
    submit = Submit(0, PROMPT, options.max_new_tokens, 0, 0.8, 0, 1.0, ignore_eos=True)
    async for event in client.ask(submit):
        if isinstance(event, Finished):
            return event.stats["decode_seconds"]
    raise AssertionError("an answer ends with Finished")
