"""``asyncspec serve`` in front of somebody: what a terminal shows, and Ctrl-C there."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import struct
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import psutil
import pytest

from http_process import TOY, TOY_ASK, alive, first_answer, started_by
from nodes.background import START
from tools.testbed.ports import free_port

pytestmark = [pytest.mark.processes, pytest.mark.asyncio]

ROWS, COLUMNS = 24, 300
CTRL_C = b"\x03"
_PARTS = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)")


class Terminal:
    """A pseudo-terminal: what was written to it, and its keys."""

    def __init__(self) -> None:
        self.ours, self.theirs = os.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.seen = ""

    def press(self, key: bytes) -> None:
        os.write(self.ours, key)

    async def until(self, pattern: str, times: int = 1) -> re.Match[str]:
        """Wait for a pattern's so many-th match. A test's time-out is the bound."""
        while len(found := list(re.finditer(pattern, self.seen))) < times:
            self.seen += await self._read()
        return found[times - 1]

    async def end(self) -> None:
        """Wait until nobody holds the other side."""
        try:
            while True:
                self.seen += await self._read()
        except OSError:  # Linux's end of a terminal
            return

    async def _read(self) -> str:
        return (await asyncio.to_thread(os.read, self.ours, 4096)).decode("ascii", "replace")

    def lines(self) -> list[str]:
        """What the screen shows, and what has scrolled off it."""
        lines, row, column = [""], 0, 0
        for part in _PARTS.finditer(self.seen):
            count, command, start, down, text = part.groups()
            if start:
                column = 0
            elif down:
                row += 1
                lines += [""] * (row + 1 - len(lines))
            elif text:
                line = lines[row].ljust(column)
                lines[row] = line[:column] + text + line[column + len(text) :]
                column += len(text)
            elif command == "A":
                row = max(0, row - int(count or 1))
            elif command == "K":
                lines[row] = "" if count == "2" else lines[row][:column]
            else:
                assert command in "mhl", f"this terminal does not know {part[0]!r}"
        return [line.rstrip() for line in lines if line.strip()]


@asynccontextmanager
async def serving(*argv: str) -> AsyncIterator[tuple[Any, Terminal, int]]:
    """``asyncspec serve``, its terminal and its port; it leaves nothing behind."""
    terminal, port = Terminal(), free_port()

    def prepare() -> None:
        fcntl.ioctl(terminal.theirs, termios.TIOCSCTTY, 0)

    command = [sys.executable, "-P", "-m", "asyncspec_nodes.cli.main", "serve"]
    child = await asyncio.create_subprocess_exec(
        *(*command, "--port", str(port), "--stages", "1", *argv),
        **dict.fromkeys(("stdin", "stdout", "stderr"), terminal.theirs),
        start_new_session=True,
        preexec_fn=prepare,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(terminal.theirs)
    try:
        yield child, terminal, port
        assert await child.wait() == 0
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
        await terminal.end()
        os.close(terminal.ours)


@pytest.mark.slow
async def test_ctrl_c_during_an_answer() -> None:
    """It says what is waited for while that goes on; another one ends the service."""
    async with serving(*TOY, "--drain-seconds", str(START)) as (child, terminal, port):
        await terminal.until(rf"serving .* on http://127\.0\.0\.1:{port}")
        family = psutil.Process(child.pid).children(recursive=True)
        long = {**TOY_ASK, "max_tokens": 6000, "stream": True}
        async with (
            aiohttp.ClientSession(f"http://127.0.0.1:{port}") as web,
            web.post("/v1/completions", json=long) as running,
        ):
            assert (await running.content.readline()).startswith(b"data: ")
            terminal.press(CTRL_C)
            said = await terminal.until(r"asyncspec: (waits up to .*?)\r")
            assert said[1] == (
                f"waits up to {START:g} s for an answer to end; "
                "a second Ctrl-C ends the service now"
            )
            for _ in range(8):  # it goes on
                assert b"error" not in await running.content.readline()
            terminal.press(CTRL_C)
            assert b"[DONE]" not in await running.content.read()
        assert await child.wait() == 0
        assert not alive(family)


@pytest.mark.slow
async def test_ctrl_c_where_nothing_runs() -> None:
    async with serving(*TOY) as (_, terminal, port):
        await terminal.until(rf"serving .* on http://127\.0\.0\.1:{port}")
        terminal.press(CTRL_C)
    assert "waits up to" not in terminal.seen


@pytest.mark.nightly
@pytest.mark.torch
async def test_access_lines_scroll_above_the_table_of_steps() -> None:
    """Each is whole, on a line of its own, and nothing of the table stays."""
    asked = 4
    async with serving("--draft", "ngram") as (child, terminal, port):
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as web:
            assert (await first_answer(web, "/health"))[0] == 200
            while not (nodes := started_by(child.pid)):
                assert (await first_answer(web, "/health"))[0] == 200
            for node in nodes:  # which import torch first of all: they get no further
                node.suspend()
            await terminal.until(r"stage 1 +(starting|loading)")
            for count in range(1, asked + 1):
                drawn = len(re.findall("stage 1 ", terminal.seen))
                async with web.post("/v1/completions", json={"prompt": "x"}) as reply:
                    assert reply.status == 503
                await terminal.until("/v1/completions", count)
                await terminal.until("stage 1 ", drawn + 1)  # the table is drawn again
            for node in nodes:
                node.resume()
            await terminal.until(rf"serving .* on http://127\.0\.0\.1:{port}")
        terminal.press(CTRL_C)
    lines = terminal.lines()
    access = [line for line in lines if "access" in line]
    whole = r"\S+Z \[info +\] access +method=POST route=/v1/completions status=503 .* request=\w+"
    assert len(access) == asked
    assert [line for line in access if not re.fullmatch(whole, line)] == []
    assert [line for line in lines if re.search(r"(stage 1|draft node) +\w+ing", line)] == []
