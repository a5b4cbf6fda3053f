"""Three machines of a network (namespaces, linked by kernels' TCP), of which one falls silent.

A machine is unplugged (all its packets are dropped) or its node's process is stopped (SIGSTOP, so
that its kernel still acknowledges). Both ends of a loss are timed by the peers' logs.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from msgspec import Struct

from asyncspec.core.errors import AsyncSpecError, ClusterError, UserError
from asyncspec_nodes.client.client import ClusterAddress
from asyncspec_nodes.client.engine import ReconnectingEngine
from asyncspec_nodes.cluster.config import (
    ClusterTable,
    Config,
    DraftTable,
    LimitsTable,
    NodeTable,
    TargetTable,
)
from asyncspec_nodes.cluster.file import to_toml
from asyncspec_protocol.messages import Finished, Output, Submit
from tools.bench.faults.runs import spread

STAGES = 2
PORT = 7100
BRIDGE = f"fb{os.getpid()}"
NETWORK = "10.81.0"
COMMAND = (sys.executable, "-P", "-m", "asyncspec_nodes.node.cli")
START_SECONDS = 300.0
NOTICE_SECONDS = 15.0
AGES = (2.0, 15.0)
"""Seconds that the links stand before a fault."""
NAMES = {0: "draft node", 1: "first stage", 2: "last stage"}
KINDS = ("unplug", "freeze")


Row = dict[str, str | int | float]


class Case(Struct, frozen=True):
    """What befalls which node when its links have stood for ``age`` seconds."""

    kind: str
    victim: int
    age: float


class Noticed(Struct, frozen=True):
    """Seconds from the fault until each peer gave the victim up, and whether the answer, once the
    victim was back, had the undisturbed one's tokens."""

    seconds: tuple[float, ...]
    equal: bool
    error: str = ""


def ip(*words: str) -> None:
    """Run ``ip``."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


def space(rank: int) -> str:
    """The name of a node's namespace."""
    return f"{BRIDGE}n{rank}"


def wire(rank: int) -> str:
    """A node's end of its link, on the bridge."""
    return f"{BRIDGE}v{rank}"


@contextmanager
def network(nodes: int, commands: Sequence[str] = ("ip", "iptables")) -> Iterator[None]:
    """A bridge with a namespace for each node, and an address of its own for clients. Raises
    ``UserError`` where that is not allowed, or one of ``commands`` is missing."""
    if os.geteuid() or not all(map(shutil.which, commands)):
        raise UserError(f"namespaces need root and {' and '.join(commands)}")
    with ExitStack() as undo:
        ip("link", "add", BRIDGE, "type", "bridge")
        undo.callback(ip, "link", "del", BRIDGE)
        ip("addr", "add", f"{NETWORK}.254/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        for rank in range(nodes):
            name = space(rank)
            ip("netns", "add", name)
            undo.callback(ip, "netns", "del", name)
            ip("link", "add", wire(rank), "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", wire(rank), "master", BRIDGE, "up")
            ip("-n", name, "addr", "add", f"{NETWORK}.{rank + 1}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield


class Machines:
    """A cluster with a machine a node. ``folder``: for its file and logs."""

    def __init__(self, target: TargetTable, folder: Path) -> None:
        self._folder = folder
        addresses = [f"{NETWORK}.{rank + 1}" for rank in range(STAGES + 1)]
        config = Config(
            cluster=ClusterTable(name="machines", stages=STAGES, insecure=True),
            target=target,
            draft=DraftTable(source="ngram"),
            limits=LimitsTable(sessions=2),
            node=tuple(NodeTable(rank=r, host=h, port=PORT) for r, h in enumerate(addresses)),
        )
        file = folder / "cluster.toml"
        file.write_text(to_toml(config), encoding="utf-8")
        self._nodes: list[subprocess.Popen[bytes]] = []
        for rank in range(STAGES + 1):
            role = "verify" if rank else "draft"
            words = ["--role", role, "--rank", str(rank), "--config", str(file)]
            entered = ["ip", "netns", "exec", space(rank), *COMMAND, *words, "--log-format", "json"]
            with self._log(rank).open("wb") as log:
                self._nodes.append(subprocess.Popen(entered, stdout=log, stderr=log))
        self.where = ClusterAddress(addresses[0], PORT, "machines")

    def close(self) -> None:
        """End all nodes."""
        for node in self._nodes:
            node.terminate()
        for node in self._nodes:
            node.wait(30)

    def events(self, rank: int, event: str, since: float) -> list[tuple[float, int]]:
        """When (Unix time) a node's log has an event of a peer, and of which."""
        found = []
        for line in self._log(rank).read_text().splitlines():
            one = json.loads(line) if line.startswith("{") else {}
            if one.get("event") == event:
                at = datetime.fromisoformat(one["timestamp"]).timestamp()
                if at >= since:
                    found.append((at, int(one["peer"])))
        return found

    async def linked(self, since: float, pairs: set[tuple[int, int]]) -> None:
        """Until each of these nodes has a link to the other that is younger than ``since``."""
        async with asyncio.timeout(START_SECONDS):
            for one, other in pairs:
                await self._logged(one, other, "linked", since)

    async def noticed(self, victim: int, since: float) -> tuple[float, ...]:
        """Seconds until each of a node's peers has given it up."""
        others = [rank for rank in range(STAGES + 1) if rank != victim]
        async with asyncio.timeout(NOTICE_SECONDS):
            return tuple(
                [await self._logged(rank, victim, "unlinked", since) - since for rank in others]
            )

    @contextmanager
    def silent(self, kind: str, victim: int) -> Iterator[None]:
        """Inside, nothing comes from a node."""
        if kind == "freeze":
            (node,) = psutil.Process(self._nodes[victim].pid).children()
            node.send_signal(signal.SIGSTOP)
            try:
                yield
            finally:
                node.send_signal(signal.SIGCONT)
            return
        drop = ["ip", "netns", "exec", space(victim), "iptables"]
        subprocess.run([*drop, "-P", "INPUT", "DROP"], check=True)
        subprocess.run([*drop, "-P", "OUTPUT", "DROP"], check=True)
        try:
            yield
        finally:
            subprocess.run([*drop, "-P", "INPUT", "ACCEPT"], check=True)
            subprocess.run([*drop, "-P", "OUTPUT", "ACCEPT"], check=True)

    async def _logged(self, rank: int, peer: int, event: str, since: float) -> float:
        """When an event of a peer was logged, once it is."""
        while True:
            found = (at for at, other in self.events(rank, event, since) if other == peer)
            if first := next(found, 0.0):
                return first
            await asyncio.sleep(0.02)

    def _log(self, rank: int) -> Path:
        return self._folder / f"{rank}.log"


PAIRS = {(a, b) for a in range(STAGES + 1) for b in range(STAGES + 1) if a != b}


async def measure(
    target: TargetTable, submit: Submit, kinds: Sequence[str], repeats: int
) -> list[Row]:
    """A row for each kind of fault, victim, and age of the links."""
    rows: list[Row] = []
    with TemporaryDirectory() as folder, network(STAGES + 1), ExitStack() as ending:
        machines = Machines(target, Path(folder))
        ending.callback(machines.close)
        await machines.linked(0.0, PAIRS)
        expected = await _ask(machines, submit, asyncio.Event())
        for kind in kinds:
            for victim, name in NAMES.items():
                for age in AGES:
                    found = [
                        await _strike(machines, Case(kind, victim, age), submit, expected)
                        for _ in range(repeats)
                    ]
                    rows.append(_row(Case(kind, victim, age), name, found))
                    sys.stderr.write(f"{json.dumps(rows[-1])}\n")
    return rows


async def _strike(
    machines: Machines, case: Case, submit: Submit, expected: tuple[int, ...]
) -> Noticed:
    """A node falls silent in the middle of an answer; returns when all links are back."""
    await asyncio.sleep(case.age)
    decoding = asyncio.Event()
    answer = asyncio.create_task(_ask(machines, submit, decoding))
    await decoding.wait()
    since, error = time.time(), ""
    seconds: tuple[float, ...] = ()
    with machines.silent(case.kind, case.victim):
        try:
            seconds = await machines.noticed(case.victim, since)
        except TimeoutError:
            error = f"not noticed in {NOTICE_SECONDS:g} s"
    try:
        equal = await answer == expected
    except AsyncSpecError as problem:
        equal, error = False, str(problem)
    await machines.linked(since, {pair for pair in PAIRS if case.victim in pair})
    return Noticed(seconds, equal, error)


async def _ask(machines: Machines, submit: Submit, decoding: asyncio.Event) -> tuple[int, ...]:
    """The tokens of an answer; ``decoding`` is set when the first ones are there."""
    tokens: list[int] = []
    async with ReconnectingEngine(machines.where.connect, waits=True) as engine:
        async for event in engine.ask(submit):
            if isinstance(event, Finished):
                if event.reason == "error":
                    raise ClusterError(event.detail)
                break
            assert isinstance(event, Output)
            tokens += event.token_ids
            decoding.set()
    return tuple(tokens)


def _row(case: Case, name: str, found: list[Noticed]) -> Row:
    seconds = [one for noticed in found for one in noticed.seconds]
    return {
        "fault": case.kind,
        "node": name,
        "age of links s": case.age,
        "runs": len(found),
        "texts equal": sum(one.equal for one in found),
        **spread(seconds),
        "error": next((one.error for one in found if one.error), ""),
    }
