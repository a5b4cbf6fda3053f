"""A cluster of ``asyncspec up`` and ``join`` on this machine: what its processes take and say."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import psutil
from msgspec import Struct

from asyncspec.core.errors import ClusterError

COMMAND = (sys.executable, "-P", "-m", "asyncspec_nodes.cli.main")
MACHINE = ("--memory-gib", "1", "--gb-per-second", "1", "--listen", "127.0.0.1:0")
START_SECONDS = 180.0
GRACE_SECONDS = 60.0
"""For so long after a machine or a node was ended, what is said of it is no fault."""

COMPLAINT = re.compile(r"\b(error|exception|failed|cannot|never awaited|was destroyed)\b", re.I)
MAX_GROWTH = {"MiB": 24.0, "files": 16.0, "threads": 4.0}
"""That a process may take more towards the end than after its first quarter; of memory a tenth in
any case."""


class Sample(Struct, frozen=True):
    """What a process takes at a time."""

    at: float
    taken: dict[str, float]


class Machine(Struct):
    """A process that a user starts, and its lines."""

    name: str
    process: asyncio.subprocess.Process
    lines: list[str]
    reading: asyncio.Task[None]


class Machines:
    """``async with``: ``up`` and one that has joined. ``folder``: for the token; ``logs``: for what
    they say, with the time of day."""

    def __init__(self, folder: Path, logs: Path | None) -> None:
        self._folder = folder
        self._logs = logs
        self._up: Machine | None = None
        # Those that have joined, the oldest first.
        self.joined: list[Machine] = []
        self._number = 0
        self._struck_at = time.monotonic()
        self.complaints: list[str] = []
        self.names: dict[int, str] = {}
        self.samples: defaultdict[int, list[Sample]] = defaultdict(list)
        self.port = 0
        self._token = ""
        self._ending = False

    async def __aenter__(self) -> Machines:
        token = ("--token-file", str(self._folder / "up.json"), "--name", "first")
        words = ("up", "--port", "0", "--no-api-key", "--machines", "2", *token)
        self._up = await self._start("first", *words, "--draft", "ngram", *MACHINE)
        self._token = (await self._said(self._up, "asyncspec join")).split()[-1]
        await self.join()
        self.port = int((await self._said(self._up, "http://127.0.0.1:")).rpartition(":")[2])
        self._struck_at = time.monotonic()
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._ending = True
        up = [] if self._up is None else [self._up]
        for machine in (*reversed(self.joined), *up):
            await self._end(machine, signal.SIGTERM)

    async def join(self) -> None:
        """Another machine joins."""
        self._number += 1
        name = f"joined-{self._number}"
        machine = await self._start(name, "join", self._token, "--name", name, *MACHINE)
        self.joined.append(machine)
        assert self._up is not None
        await self._said(self._up, f"{name} has joined")

    async def leave(self, how: signal.Signals) -> None:
        """The one that has been here longest ends, its nodes with it."""
        self._struck_at = time.monotonic()
        await self._end(self.joined.pop(0), how)
        self._struck_at = time.monotonic()

    def kill_stage(self, place: int) -> None:
        """One of the stages' processes is killed."""
        stages = [process for process, name in self._processes() if "stage" in name]
        if stages:
            self._struck_at = time.monotonic()
            stages[place % len(stages)].kill()

    @property
    def is_up(self) -> bool:
        """Whether the machine that serves still runs."""
        return self._up is not None and self._up.process.returncode is None

    @property
    def excused(self) -> bool:
        """Whether something was ended a short time ago."""
        return time.monotonic() - self._struck_at < GRACE_SECONDS

    def sample(self) -> None:
        """Note what every process takes now."""
        for process, name in self._processes():
            try:
                taken = {
                    "MiB": process.memory_info().rss / 2**20,
                    "files": float(process.num_fds()),
                    "threads": float(process.num_threads()),
                }
            except psutil.Error:
                continue
            self.names[process.pid] = name
            self.samples[process.pid].append(Sample(time.monotonic(), taken))

    def _processes(self) -> Iterator[tuple[psutil.Process, str]]:
        for machine in (*([] if self._up is None else [self._up]), *self.joined):
            try:
                root = psutil.Process(machine.process.pid)
                yield root, machine.name
                for process in root.children(recursive=True):
                    yield process, f"{machine.name}: {_kind(process.cmdline())}"
            except psutil.Error:
                continue

    async def _start(self, name: str, *words: str) -> Machine:
        process = await asyncio.create_subprocess_exec(
            *COMMAND, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        lines: list[str] = []
        reading = asyncio.create_task(self._read(name, process, lines))
        return Machine(name, process, lines, reading)

    async def _read(self, name: str, process: asyncio.subprocess.Process, lines: list[str]) -> None:
        assert process.stdout is not None
        async for data in process.stdout:
            line = data.decode(errors="replace").rstrip()
            lines.append(line)
            if self._logs is not None:
                with (self._logs / f"{name}.log").open("a", encoding="utf-8") as log:
                    log.write(f"{datetime.now(UTC):%H:%M:%S} {line}\n")
            # A traceback is nobody's doing but ours.
            if "Traceback" in line or (COMPLAINT.search(line) and not self.excused):
                self.complaints.append(f"{name}: {line[:300]}")
        if name == "first" and not self._ending:
            self.complaints.append(f"asyncspec up has ended: {lines[-3:]}")

    async def _said(self, machine: Machine, text: str) -> str:
        """The line with a text, once it is there. Raises ``ClusterError``."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and machine.process.returncode is None:
            if line := next((line for line in machine.lines if text in line), ""):
                return line
            await asyncio.sleep(0.1)
        raise ClusterError(f"{machine.name} does not say {text!r}: {machine.lines[-3:]}")

    async def _end(self, machine: Machine, how: signal.Signals) -> None:
        if machine.process.returncode is None:
            machine.process.send_signal(how)
        try:
            await asyncio.wait_for(machine.process.wait(), START_SECONDS)
        except TimeoutError:
            self.complaints.append(f"{machine.name} did not end within {START_SECONDS:g} s")
            machine.process.kill()
        await machine.reading


def _kind(command: Sequence[str]) -> str:
    if "--role" in command:
        role, rank = (command[command.index(name) + 1] for name in ("--role", "--rank"))
        return f"stage {rank}" if role == "verify" else role
    return "worker"


def grown(samples: Sequence[Sample], start: float, end: float) -> dict[str, tuple[float, float]]:
    """What a process took after the first quarter and took towards the end, where that is more than
    ``MAX_GROWTH`` allows; nothing of a process that was there for less than a third of the time."""
    first = max(samples[0].at + (end - samples[0].at) / 4, start + (end - start) / 4)
    later = [sample for sample in samples if sample.at >= first]
    if len(later) < 6 or later[-1].at - samples[0].at < (end - start) / 3:
        return {}
    third, growth = len(later) // 3, {}
    for name, allowed in MAX_GROWTH.items():
        early, late = (
            median(sample.taken[name] for sample in part)
            for part in (later[:third], later[-third:])
        )
        if late - early > max(allowed, early / 10 if name == "MiB" else 0.0):
            growth[name] = (early, late)
    return growth
