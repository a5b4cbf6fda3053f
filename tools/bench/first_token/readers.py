"""What reads a prompt: a cluster of ours, or an engine alone in a process of its own."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Protocol

import msgspec
import psutil
from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.errors import ClusterError
from asyncspec_nodes.client.client import Client
from asyncspec_nodes.local.cluster import LocalCluster
from asyncspec_protocol.messages import Finished, Output
from tools.bench.first_token.setting import CHUNK_ROWS, Setting
from tools.bench.limits.requests import greedy

CHILD = Path(__file__).with_name("alone_child.py")
POLICY = "autoregressive"


LIKELY = 10
"""Tokens that the engine alone tells beside the first one."""


class FirstToken(Struct, frozen=True):
    """Seconds from a prompt's tokens to the first token of the answer, and that token."""

    seconds: float
    token: int
    # By how much the logits of the likeliest tokens, itself among them, are below its own; only the
    # engine alone tells.
    gaps: Mapping[int, float] = {}
    # Seconds of processors meanwhile: its own processes', and everybody else's on this machine.
    processor_seconds: float = 0.0
    others_seconds: float = 0.0


class Reader(Protocol):
    """Asked one prompt at a time."""

    @property
    def pids(self) -> Sequence[int]:
        """The processes whose memory counts."""

    async def read(self, prompt: Sequence[int]) -> FirstToken:
        """Raises ``ClusterError``."""


class Ours:
    """A running cluster and its client."""

    def __init__(self, cluster: LocalCluster, client: Client) -> None:
        self._cluster, self._client = cluster, client

    @classmethod
    async def open(cls, cluster: LocalCluster, stack: AsyncExitStack) -> Ours:
        """Start a cluster, which ends with ``stack``. Raises ``AsyncSpecError``."""
        await stack.enter_async_context(cluster)
        client = await Client.connect(*cluster.address, cluster.config.cluster.name)
        stack.push_async_callback(client.close)
        return cls(cluster, client)

    @property
    def pids(self) -> Sequence[int]:
        return self._cluster.pids

    async def read(self, prompt: Sequence[int]) -> FirstToken:
        start = time.perf_counter()
        async with aclosing(self.stream(prompt, 1)) as answer:
            async for now, token in answer:
                return FirstToken(now - start, token)
        raise ClusterError("the answer has no token")

    async def stream(
        self, prompt: Sequence[int], tokens: int
    ) -> AsyncGenerator[tuple[float, int], None]:
        """The tokens of a greedy answer, each with its ``time.perf_counter``. Raises
        ``ClusterError``."""
        submit = greedy(POLICY, tokens, token_ids=prompt)
        async for event in self._client.ask(submit):
            match event:
                case Output(token_ids=new):
                    now = time.perf_counter()
                    for token in new:
                        yield now, token
                case Finished(reason="error", detail=detail):
                    raise ClusterError(detail)
                case _:
                    pass


class Pipeline(Struct, frozen=True):
    """llama.cpp's RPC workers, as the process finds them that reads prompts with them."""

    places: list[str]
    pids: list[int]
    # Before its command, and of its environment.
    prefix: tuple[str, ...]
    environment: dict[str, str]


class Alone:
    """transformers or llama.cpp in one process with the whole model, or with its layers at
    llama.cpp's RPC workers. ``close`` ends it."""

    def __init__(
        self,
        setting: Setting,
        threads: int,
        pipeline: Pipeline | None = None,
    ) -> None:
        argument = {
            "engine": setting.engine,
            "target": str(setting.target),
            "weights": setting.weights,
            "threads": threads,
            "context": setting.slots,
            "likely": LIKELY,
            "pass_rows": CHUNK_ROWS if setting.stage_seconds else 0,
            "workers": pipeline.places if pipeline else [],
        }
        self._workers = pipeline.pids if pipeline else []
        command = [sys.executable, "-P", str(CHILD), json.dumps(argument)]
        self._process = subprocess.Popen(
            [*(pipeline.prefix if pipeline else ()), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **(pipeline.environment if pipeline else {})},
        )

    @property
    def pids(self) -> Sequence[int]:
        return (self._process.pid, *self._workers)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()

    async def read(self, prompt: Sequence[int]) -> FirstToken:
        # A thread waits: a client that is silent for seconds is taken for lost.
        line = await asyncio.to_thread(self._exchange, json.dumps(list(prompt)))
        if not line:
            raise ClusterError("the engine alone has failed; run alone_child.py to see why")
        return msgspec.json.decode(line, type=FirstToken)

    def _exchange(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return ""
        return self._process.stdout.readline()


async def read_with_load(reader: Reader, prompt: Sequence[int]) -> FirstToken:
    """As ``Reader.read``, with what the processors did meanwhile."""
    before_reading, busy = processor_seconds(reader.pids), busy_seconds()
    answer = await reader.read(prompt)
    spent = processor_seconds(reader.pids) - before_reading
    others = busy_seconds() - busy - spent
    return replace(answer, processor_seconds=spent, others_seconds=max(0.0, others))


def processor_seconds(pids: Sequence[int]) -> float:
    """What these processes have taken so far."""
    times = (psutil.Process(pid).cpu_times() for pid in pids)
    return math.fsum(each.user + each.system for each in times)


def busy_seconds() -> float:
    """What all processes have taken of all processors so far, and other machines of the same host
    (``steal``)."""
    times = psutil.cpu_times()
    waiting: float = times.idle + getattr(times, "iowait", 0.0)
    return math.fsum(times) - waiting


def peak_mib(reader: Reader) -> float:
    """Sum of the largest resident sizes so far; weights that processes share count in each."""
    total = 0
    for pid in reader.pids:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                total += int(line.split()[1])
    return total / 1024
