"""What a child says comes line by line, however long a line is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.errors import AsyncSpecError, ClusterError
from asyncspec_nodes.local.processes import lines
from asyncspec_nodes.local.supervisor import ChildNode
from asyncspec_nodes.node.reports import FailureReport, Report

LONG = "x" * 300_000


@given(st.lists(st.text("ab\n", max_size=12).map(str.encode), max_size=8))
def test_lines_do_not_depend_on_how_they_come(pieces: list[bytes]) -> None:
    async def main() -> list[bytes]:
        reader = asyncio.StreamReader()

        async def write() -> None:
            for piece in pieces:
                reader.feed_data(piece)
                await asyncio.sleep(0)
            reader.feed_eof()

        writing = asyncio.create_task(write())
        found = [line async for line in lines(reader)]
        await writing
        return found

    assert asyncio.run(main()) == b"".join(pieces).splitlines()


class Said:
    """A process that has said something and ended."""

    pid = 1
    returncode = 1

    def __init__(self, said: bytes) -> None:
        self.stdout = asyncio.StreamReader()
        self.stdout.feed_data(said)
        self.stdout.feed_eof()

    async def wait(self) -> int:
        return 1

    def terminate(self) -> None:
        raise ProcessLookupError

    def close(self) -> None:
        """It has no pipes."""


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
