"""A machine of an ``asyncspec up`` cluster that goes for good in the middle of an answer.

Three machines (namespaces), each with a stage; with a spare a fourth one. One that has joined is
killed (SIGKILL of all its processes), stopped (SIGSTOP) or unplugged (its link goes down). Seconds
are from the fault on: until ``up`` says that it is gone, until its stage serves again, and the
longest wait of the stream.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import psutil
from msgspec import Struct

from asyncspec.core.errors import ClusterError
from tools.bench.faults.machines import NETWORK, Row, ip, network, space, wire
from tools.bench.faults.runs import DECODING, spread, wait_after

STAGES = 3
PORT = 8000
URL = f"http://{NETWORK}.1:{PORT}/v1/completions"
READY = f"http://{NETWORK}.1:{PORT}/ready"
START_SECONDS = 300.0
ANSWER_SECONDS = 300.0
SETTLE_SECONDS = 30.0
"""For a spare to import what stages need, on a busy machine."""

NEW_TOKENS = 120
KINDS = ("kill", "stop", "unplug")
NONE = "none"
SPARES = {"cold": (), "warm": ("--warm",), NONE: ()}
"""Options of ``up``, by what the spare does."""

VICTIM = 2
COMMAND = (sys.executable, "-P", "-m", "asyncspec_nodes.cli.main")
MACHINE = ("--memory-gib", "4", "--gb-per-second", "1")
"""All machines are alike: each gets a stage, and has room for two."""


class Gone(Struct, frozen=True):
    """One run: seconds, and whether the text is the undisturbed one."""

    noticed: float
    serving: float
    silence: float
    equal: bool


class Machine:
    """A machine's command, with the lines that it prints and when."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[tuple[float, str]] = []
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, number: int, *words: str) -> Machine:
        """A command of ``asyncspec`` on machine ``number``, from 0 on."""
        argv = ["ip", "netns", "exec", space(number), *COMMAND, *words]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *argv, stderr=pipe, stdout=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        return cls(process)

    async def says(self, text: str, since: float = 0.0) -> tuple[float, str]:
        """A line with a text, and when it was printed, once it is there."""
        async with asyncio.timeout(START_SECONDS):
            while True:
                for at, line in self.lines:
                    if text in line and at >= since:
                        return at, line
                if self._reading.done():
                    raise ClusterError(f"{text!r} was never said: {self.lines[-5:]}")
                await asyncio.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        """Send it to every process of the machine."""
        command = psutil.Process(self.process.pid)
        for process in [command, *command.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    async def close(self) -> None:
        """End all its processes."""
        with suppress(psutil.NoSuchProcess):
            self.signal(signal.SIGKILL)
        await self.process.wait()
        await self._reading

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.lines.append((time.monotonic(), line.decode().rstrip()))


async def measure(kinds: Sequence[str], repeats: int) -> list[Row]:
    """A row for each kind of end and of spare."""
    rows: list[Row] = []
    with network(STAGES + 1, ("ip",)):
        for spare in SPARES:
            for kind in kinds:
                runs = [await _run(kind, spare) for _ in range(repeats)]
                rows.append(summary(kind, spare, runs))
                sys.stderr.write(f"{json.dumps(rows[-1])}\n")
    return rows


async def _run(kind: str, spare: str) -> Gone:
    """A cluster of its own, which loses a machine."""
    machines: list[Machine] = []
    with TemporaryDirectory() as folder, ExitStack() as undo:
        try:
            up = await _start(machines, Path(folder), spare)
            expected, _ = await _ask(None)
            hit: list[float] = []

            def strike() -> None:
                hit.append(time.monotonic())
                undo.enter_context(_ended(kind, machines[VICTIM]))

            text, times = await _ask(strike)
            noticed, _ = await up.says(" is gone: ", hit[0])
            serving, _ = await up.says("all stages serve", hit[0])
            return Gone(
                noticed - hit[0],
                serving - hit[0],
                wait_after(hit[0], times),
                text == expected,
            )
        finally:
            for machine in reversed(machines):
                await machine.close()


async def _start(machines: list[Machine], folder: Path, spare: str) -> Machine:
    tokens = str(folder / "up.json")
    service = ["--host", f"{NETWORK}.1", "--port", str(PORT), "--no-api-key"]
    how = ["--machines", str(STAGES), "--stages", str(STAGES), "--token-file", tokens]
    up = await Machine.start(0, "up", *service, *how, "--name", "one", *MACHINE, *SPARES[spare])
    machines.append(up)
    _, line = await up.says("asyncspec join")
    token = line.split()[-1]
    names = ("two", "three", "four")[: STAGES - 1 + (spare != NONE)]
    for number, name in enumerate(names, start=1):
        if number == STAGES:
            await up.says("serving ")
        machines.append(await Machine.start(number, "join", token, "--name", name, *MACHINE))
    await up.says("serving ")
    await _ready()
    if spare != NONE:
        await machines[-1].says("a spare")
        await asyncio.sleep(SETTLE_SECONDS)
    return up


async def _ready() -> None:
    """Until a request would be served."""
    async with asyncio.timeout(START_SECONDS), aiohttp.ClientSession() as session:
        while True:
            async with session.get(READY) as answer:
                if answer.status == 200:
                    return
            await asyncio.sleep(0.1)


@contextmanager
def _ended(kind: str, machine: Machine) -> Iterator[None]:
    """A machine goes for good; outside its link is up again."""
    if kind == "kill":
        machine.signal(signal.SIGKILL)
    elif kind == "stop":
        machine.signal(signal.SIGSTOP)
    else:
        ip("link", "set", wire(VICTIM), "down")
    yield
    if kind == "unplug":
        ip("link", "set", wire(VICTIM), "up")


async def _ask(strike: object) -> tuple[str, list[float]]:
    """An answer's text, and when its pieces came; ``strike`` is called once it is decoded."""
    body = {
        "prompt": "Once upon a time",
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    text, times = "", list[float]()
    limit = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    async with (
        aiohttp.ClientSession(timeout=limit) as session,
        session.post(URL, json=body) as answer,
    ):
        async for line in answer.content:
            data = line.decode().strip()
            if answer.status != 200 or '"error":' in data:
                raise ClusterError(data)
            if not data.startswith("data: {"):
                continue
            event = json.loads(data.removeprefix("data: "))
            if not event["choices"] or not (more := event["choices"][0]["text"]):
                continue
            text += more
            times.append(time.monotonic())
            if callable(strike) and len(times) == DECODING:
                strike()
    return text, times


def summary(kind: str, spare: str, runs: Sequence[Gone]) -> Row:
    """A row."""

    def most(name: str) -> float:
        return round(max(float(getattr(run, name)) for run in runs), 2)

    return {
        "end": kind,
        "spare": spare,
        "runs": len(runs),
        "texts equal": sum(run.equal for run in runs),
        "gone, most s": most("noticed"),
        "serves, most s": most("serving"),
        **{
            f"silence, {key}": value for key, value in spread([run.silence for run in runs]).items()
        },
        "load": round(os.getloadavg()[0], 1),
    }
