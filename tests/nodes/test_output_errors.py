"""Output that cannot be written: one line, or none where nobody is to read it; and what is said on
stderr beside it, which no command fails for."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

import aiohttp
import msgspec
import pytest

from asyncspec_nodes.cli import main as cli
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.console.log import make_logger
from asyncspec_nodes.console.log_table import LogFormat, LogTable
from asyncspec_nodes.console.output import MAX_WAITING, service_stderr
from asyncspec_nodes.node import cli as node_cli
from asyncspec_protocol.ids import Rank
from http_process import process
from toy_service import ENDLESS, RULES, ServingCluster

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")

NO_SPACE = "asyncspec: cannot write: No space left on device\n"
MEMORY = f"memory --target {BUNDLED_TARGET}"
SIMULATE = "simulate --policy chain --tokens 8"
PLAN = "plan dipsd --preset paper"


@pytest.fixture
def full() -> Iterator[TextIO]:
    """A stream, a line at a time, to a disk that is full."""
    descriptor = os.open("/dev/full", os.O_WRONLY)
    stream = open(descriptor, "w", buffering=1, closefd=False)  # noqa: SIM115
    yield stream
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)  # it still has the lines
    stream.close()
    os.close(descriptor)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace"
    assert cli.main([*shlex.split(SIMULATE), "--trace", str(path)]) == 0
    return path


@pytest.mark.parametrize(
    "command",
    [
        "--help",
        "run --help",
        "--version",
        "policies",
        pytest.param(MEMORY, marks=pytest.mark.torch),
        pytest.param(f"{MEMORY} --json", marks=pytest.mark.torch),
        SIMULATE,
        f"{SIMULATE} --json",
        PLAN,
        f"{PLAN} --json",
        "trace TRACE",
        "trace TRACE --summary",
        "trace TRACE --summary --json",
        "trace TRACE --replay",
        "trace TRACE --perfetto TRACE.json",
    ],
)
def test_a_full_disk(
    command: str,
    trace: Path,
    full: TextIO,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdout", full)
    assert cli.main(shlex.split(command.replace("TRACE", str(trace)))) == 1
    assert capsys.readouterr().err == NO_SPACE


def test_stderr_on_a_full_disk(
    full: TextIO,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stderr", full)
    assert cli.main(["run", "--stages", "9"]) == 2
    node = ["--role", "verify", "--rank", "1", "--config", str(tmp_path / "none")]
    assert node_cli.main(node) == 2
    assert capsys.readouterr().out == ""
    assert sys.stderr is full


def shell(words: str) -> tuple[int, str, str]:
    """A command as a process: exit code and both outputs."""
    done = subprocess.run(["sh", "-c", words], capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout, done.stderr


PADDING = "x" * 900
LINES = 2 * MAX_WAITING // len(PADDING)
"""More than waits and is in a pipe."""


def check_log(text: str, why: str) -> None:
    """The first lines, how many of the others were lost, and one that came later."""
    *first, lost, last = text.splitlines()
    numbers = [int(found[1]) for line in first if (found := re.search(r"number\W+(\d+)", line))]
    assert numbers == list(range(len(first)))
    assert 0 < len(first) < LINES
    assert all(line.count(PADDING) == 1 for line in first)
    assert str(LINES - len(first)) in lost
    assert "lines of this log were lost" in lost
    assert why in lost
    assert "later" in last


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_log_whose_reader_stalls_holds_nothing_up(
    form: LogFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines that did not fit anywhere are counted."""
    reads, writes = os.pipe()
    with open(reads, "rb") as pipe, open(writes, "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with service_stderr():
            log = make_logger(LogTable(format=form))
            for number in range(LINES):
                log.info("said", number=number, padding=PADDING)
            os.set_blocking(reads, False)
            text = pipe.read()
            assert os.get_blocking(writes)  # others have this pipe, too
            while (more := _flushed(pipe)) is not None:
                text += more
            log.info("later")
            text += pipe.read()
        assert sys.stderr is stream
    if form == "json":
        assert all(map(msgspec.json.decode, text.splitlines()))
    check_log(text.decode(), "nobody read it")


def _flushed(pipe: BinaryIO) -> bytes | None:
    """What waited; None where nothing does."""
    sys.stderr.flush()
    found: bytes | None = pipe.read()
    return found


def test_a_log_on_a_disk_that_is_full_for_a_while(
    full: TextIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", full)
    with service_stderr(), (tmp_path / "log").open("w+") as disk:
        log = make_logger(LogTable())
        for number in range(LINES):
            log.info("said", number=number, padding=PADDING)
        os.dup2(disk.fileno(), full.fileno())
        log.info("later")
        check_log(Path(disk.name).read_text(), "No space left on device")


def test_a_line_that_is_longer_than_what_may_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "x" * (2 * MAX_WAITING) + "\n"
    with (tmp_path / "log").open("w") as disk:
        monkeypatch.setattr(sys, "stderr", disk)
        with service_stderr():
            sys.stderr.write(line)
    assert Path(disk.name).read_text() == line


COMMAND = f"{sys.executable} -m asyncspec_nodes.cli.main"


@pytest.mark.parametrize("command", ["policies", "--help"])
@pytest.mark.parametrize(
    ("into", "code", "says"), [(">/dev/full", 1, NO_SPACE), (">&-", 0, ""), (">&- 2>&-", 0, "")]
)
def test_processes(command: str, into: str, code: int, says: str) -> None:
    assert shell(f"{COMMAND} {command} {into}") == (code, "", says)


def test_a_reader_that_closes_the_pipe() -> None:
    """The end of the pipe is closed before anything is written."""
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(
        [*shlex.split(COMMAND), "policies"], stdout=writes, stderr=subprocess.PIPE, timeout=60
    )
    os.close(writes)
    assert (done.returncode, done.stderr) == (1, b"")


RUN = "run --connect {} --prompt x --max-new-tokens 5 --ignore-eos"
LONG = f"run --connect {{}} --prompt x --max-new-tokens {ENDLESS} --ignore-eos"


@pytest.mark.sampled(3)
@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        (f"{RUN} >/dev/full", 1, NO_SPACE),
        (f"{RUN} --json >/dev/full", 1, NO_SPACE),
        # The first words cannot be written: nobody waits for the others.
        (f"{LONG} >/dev/full", 1, NO_SPACE),
        (f"{LONG} >/dev/full 2>/dev/full", 1, ""),
        (f"{RUN} --json 2>/dev/full", 0, ""),
        (f"{RUN} 2>/dev/full", 0, ""),
        (f"{RUN} 2>&-", 0, ""),
    ],
)
async def test_a_running_cluster(command: str, code: int, says: str) -> None:
    async with ServingCluster(2, RULES) as cluster:
        host, port = cluster.ports[Rank(0)]
        child = await asyncio.create_subprocess_shell(
            f"exec {COMMAND} {command.format(f'{host}:{port}')}",
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, err = await child.communicate()
    assert (child.returncode, err.decode()) == (code, says)
    assert bool(out) == (not code)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_service_whose_log_nobody_reads() -> None:
    async with ServingCluster(2, RULES) as cluster:
        host, port = cluster.ports[Rank(0)]
        argv = ("serve", "--port", "0", "--connect", f"{host}:{port}")
        # ``limit``: what is above it is left in the pipe.
        async with process("asyncspec_nodes.cli.main", *argv, limit=1024) as (child, url):
            async with asyncio.timeout(240), aiohttp.ClientSession(url) as web:
                for _ in range(800):  # each has its line
                    async with web.get("/v1/models") as reply:
                        assert reply.status == 200
            child.terminate()
            await child.communicate()
    assert child.returncode == 0
