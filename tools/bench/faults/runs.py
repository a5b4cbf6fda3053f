"""One answer with a fault in it, and what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import psutil
from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.errors import AsyncSpecError, ClusterError
from asyncspec_nodes.client.client import ClusterAddress
from asyncspec_nodes.client.engine import ReconnectingEngine
from asyncspec_nodes.local.cluster import LocalCluster
from asyncspec_protocol.messages import Finished, Output, Status, Submit
from tools.bench.faults.relay import RelayedLauncher

STOP_SECONDS = 2.0
"""How long a stopped process sleeps."""

DECODING = 8
"""Tokens that are there when a fault meets an answer while it is decoded."""

SETTLE_SECONDS = 20.0
"""Time for the last session to be closed everywhere."""

KINDS = ("kill", "stop", "cut", "restart")
MOMENTS = ("prefill", "decode")

Strike = Callable[[], Coroutine[Any, Any, None]]


class Case(Struct, frozen=True):
    """Which fault, of which nodes, and when."""

    kind: str
    victims: tuple[int, ...]
    moment: str


class Outcome(Struct, frozen=True):
    """``seconds``: from the fault to the token that ends the longest wait after it."""

    seconds: float
    equal: bool
    error: str = ""


class Bed:
    """A running cluster, and the answer that it gives undisturbed."""

    def __init__(self, cluster: LocalCluster, launcher: RelayedLauncher, submit: Submit) -> None:
        self._cluster = cluster
        self._launcher = launcher
        self._submit = submit
        self._tokens: tuple[int, ...] = ()
        self._asked = 0
        # Of the prompt of the last answer, found in the prefix cache.
        self._shared = 0.0
        self.first_token_seconds = 0.0

    async def begin(self) -> None:
        """The undisturbed answer, twice: the first warms up. Raises ``ClusterError`` where the
        prompt was not read anew."""
        for _ in range(2):
            started = time.monotonic()
            times, tokens = await self._ask(None, None)
            self._tokens, self.first_token_seconds = tokens, times[0] - started
            if self._shared:
                raise ClusterError(f"{self._shared:g} tokens of the prompt were not read again")

    async def run(self, case: Case) -> Outcome:
        """Raises ``ClusterError`` where the cluster keeps something of the answer."""
        hit: list[float] = []

        async def strike() -> None:
            hit.append(time.monotonic())
            await self._strike(case)

        delay = self.first_token_seconds / 2 if case.moment == "prefill" else None
        try:
            times, tokens = await self._ask(strike, delay)
        except AsyncSpecError as error:
            return Outcome(time.monotonic() - hit[0], equal=False, error=str(error))
        await self.settled()
        return Outcome(wait_after(hit[0], times), equal=tokens == self._tokens)

    async def settled(self) -> tuple[Status, ...]:
        """The nodes' states once none of them has a session."""
        async with asyncio.timeout(SETTLE_SECONDS), self._engine() as engine:
            while True:
                with contextlib.suppress(ClusterError):  # the draft node is just linked anew
                    nodes = await engine.nodes()
                    all_there = len(nodes) == len(self._cluster.config.nodes)
                    if all_there and not any(n.sessions or n.waiting for n in nodes):
                        return nodes
                await asyncio.sleep(0.1)

    def memory_mib(self) -> float:
        """Of all node processes: what they do not share."""
        infos = (psutil.Process(pid).memory_full_info() for pid in self._cluster.pids)
        return float(sum(info.uss for info in infos)) / 2**20

    def _engine(self) -> ReconnectingEngine:
        where = ClusterAddress(*self._cluster.address, self._cluster.config.cluster.name)
        return ReconnectingEngine(where.connect, waits=True)

    async def _ask(
        self, strike: Strike | None, delay: float | None
    ) -> tuple[list[float], tuple[int, ...]]:
        """When tokens came, and the tokens; ``strike`` after ``delay``, or when it decodes."""
        # Each a tenant's of its own, which shares no prefix: a fault meets a prompt that is read.
        self._asked += 1
        submit = replace(self._submit, tenant=f"run {self._asked}")
        times: list[float] = []
        tokens: list[int] = []
        struck: asyncio.Task[None] | None = None
        async with self._engine() as engine:
            if strike is not None and delay is not None:
                struck = asyncio.create_task(self._later(delay, strike))
            async for event in engine.ask(submit):
                if isinstance(event, Finished):
                    if event.reason == "error":
                        raise ClusterError(event.detail)
                    self._shared = event.stats["shared_tokens"]
                    break
                assert isinstance(event, Output)
                times += [time.monotonic()] * len(event.token_ids)
                tokens += event.token_ids
                if strike is not None and struck is None and len(tokens) >= DECODING:
                    struck = asyncio.create_task(strike())
            if struck is not None:
                await struck
        return times, tuple(tokens)

    @staticmethod
    async def _later(delay: float, strike: Strike) -> None:
        await asyncio.sleep(delay)
        await strike()

    async def _strike(self, case: Case) -> None:
        if case.kind == "cut":
            for rank in case.victims:
                self._launcher.cut(rank)
            return
        pids = [self._cluster.pids[rank] for rank in case.victims]
        signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "restart": signal.SIGTERM}
        for pid in pids:
            os.kill(pid, signals[case.kind])
        if case.kind == "stop":
            await asyncio.sleep(STOP_SECONDS)
            for pid in pids:
                os.kill(pid, signal.SIGCONT)


def wait_after(fault: float, times: Sequence[float]) -> float:
    """Seconds from a fault to the token that ends the longest wait after it: tokens that were on
    their way come at once. 0 where none came after it."""
    after = [fault, *(at for at in times if at > fault)]
    waits = [(after[i] - after[i - 1], after[i]) for i in range(1, len(after))]
    return max(waits)[1] - fault if waits else 0.0


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Columns of a row."""
    return {
        "least s": round(min(seconds), 2),
        "median s": round(statistics.median(seconds), 2),
        "most s": round(max(seconds), 2),
    }
