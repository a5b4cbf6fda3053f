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

READY = (
    b'{"event": "ready", "rank": 2, "layers": [0, 1], "dtype": "", "guarantee": "", "seconds": 0}'
)
ALIVE = b'{"event": "alive", "rank": 2}'


class Said:
    """A process that has said something and ended."""

    pid = (1 << 22) + 1  # Linux gives none as high
    returncode = 1

    def __init__(self, said: bytes) -> None:
        self.stdout = asyncio.StreamReader(limit=MAX_REPORT_BYTES)
        self.stdout.feed_data(said)
        self.stdout.feed_eof()

    async def wait(self) -> int:
        return 1

    def terminate(self) -> None:
        raise ProcessLookupError


class Quiet(Said):
    """A process that serves, and before each report lets as many waits for it pass as it may."""

    def __init__(self, waits: int, reports: int) -> None:
        super().__init__(b"\n".join([READY, *[ALIVE] * reports, b""]))
        self._readline = self.stdout.readline
        self._waits = self._left = waits
        self.stdout.readline = self._late  # type: ignore[method-assign]

    async def _late(self) -> bytes:
        if self._left:
            self._left -= 1
            await asyncio.Event().wait()
        self._left = self._waits
        return await self._readline()


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


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two waits for a report may pass without one, the third is too many."""
    monkeypatch.setattr(children, "ALIVE_SECONDS", 0.01)
    monkeypatch.setattr(children, "HUNG_SECONDS", 0.02)


@pytest.mark.usefixtures("brief")
def test_a_node_that_hangs_is_killed(tmp_path: Path) -> None:
    node = f"import time; print({READY.decode()!r}, flush=True); time.sleep(600)"

    async def main() -> AsyncSpecError:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", node), stdout=asyncio.subprocess.PIPE
        )
        return await ChildNode(2, "verify", process, tmp_path / "log").watch(lambda report: None)

    assert "was stopped, or hung, for 0.02 s, and was killed" in str(asyncio.run(main()))


@pytest.mark.usefixtures("brief")
def test_a_node_that_reports_is_not_killed_however_long_it_runs(tmp_path: Path) -> None:
    reports: list[Report] = []
    log = tmp_path / "log"
    log.touch()

    async def main() -> AsyncSpecError:
        return await ChildNode(2, "verify", Quiet(2, 20), log).watch(reports.append)  # type: ignore[arg-type]

    assert "has ended with code 1" in str(asyncio.run(main()))
    assert len(reports) == 21
