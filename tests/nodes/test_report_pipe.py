"""Reports of a child process may be of any length."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from asyncspec.core.errors import AsyncSpecError, ClusterError
from asyncspec_nodes.local.children import MAX_REPORT_BYTES, ChildNode
from asyncspec_nodes.node.reports import FailureReport, Report

LONG = "x" * 300_000


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
