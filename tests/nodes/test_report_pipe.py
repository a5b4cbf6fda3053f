"""Reports of a child process may be of any length."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec
import pytest

from asyncspec.core.errors import AsyncSpecError, ClusterError
from asyncspec_nodes.local import children
from asyncspec_nodes.local.children import MAX_REPORT_BYTES, ChildNode
from asyncspec_nodes.node.reports import FailureReport, Report

LONG = "x" * 300_000

NODE = """
import sys, time
print('{"event": "ready", "rank": 2, "layers": [0, 1], "dtype": "", "guarantee": "", "seconds": 0}')
for _ in range(int(sys.argv[1])):
    print('{"event": "alive", "rank": 2}', flush=True)
    time.sleep(0.05)
time.sleep(float(sys.argv[2]))
"""
"""A node that serves, and reports so often that it lives before it sleeps."""


class Said:
    """A process that has said something and ended."""

    pid = 1
    returncode = 1

    def __init__(self, said: bytes) -> None:
        self.stdout = asyncio.StreamReader(limit=MAX_REPORT_BYTES)
        self.stdout.feed_data(said)
        self.stdout.feed_eof()

    async def wait(self) -> int:
        return 1

    def terminate(self) -> None:
        raise ProcessLookupError


def test_a_report_of_any_length_is_read(tmp_path: Path) -> None:
    reports: list[Report] = []

    async def main() -> AsyncSpecError:
        said = [b"no report", LONG.encode(), msgspec.json.encode(FailureReport(2, "cluster", LONG))]
        child = ChildNode(2, "verify", Said(b"\n".join(said) + b"\n"), tmp_path / "log")
        return await child.watch(reports.append)

    error = asyncio.run(main())
    assert isinstance(error, ClusterError)
    assert str(error) == f"stage 2 failed: {LONG}"
    assert reports == [FailureReport(2, "cluster", LONG)]


@pytest.mark.parametrize(
    ("times", "sleeps", "reported"),
    [(1, 600.0, "was stopped, or hung, for 0.4 s, and was killed"), (20, 0.0, "ended with code 0")],
)
def test_a_node_that_hangs_is_killed(
    times: int, sleeps: float, reported: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that sends reports is not, however long it runs."""
    monkeypatch.setattr(children, "ALIVE_SECONDS", 0.2)
    monkeypatch.setattr(children, "HUNG_SECONDS", 0.4)
    log = tmp_path / "log"
    log.touch()

    async def main() -> AsyncSpecError:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", NODE, str(times), str(sleeps)), stdout=asyncio.subprocess.PIPE
        )
        return await ChildNode(2, "verify", process, log).watch(lambda report: None)

    assert reported in str(asyncio.run(main()))
