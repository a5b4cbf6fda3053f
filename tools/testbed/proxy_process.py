"""The proxy as a child: started where the bed has its switch, gone when its owner is."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from asyncspec.core.errors import ClusterError
from tools.testbed.routes import Orders

MAIN = Path(__file__).parent / "__main__.py"
STOP_SECONDS = 5.0


@contextlib.contextmanager
def proxy(orders: Orders, prefix: Sequence[str]) -> Iterator[subprocess.Popen[bytes] | None]:
    """Inside, all routes listen. Without routes there is no process. Raises ``ClusterError`` where
    it cannot be, or has ended by itself meanwhile."""
    if not orders.routes:
        yield None
        return
    with _started([*prefix, sys.executable, str(MAIN), "proxy"]) as process:
        try:
            _begin(process, orders)
            with _blamed(process):
                yield process
        finally:
            _end(process)


async def watch(process: subprocess.Popen[bytes] | None) -> ClusterError:
    """Wait until it ends by itself, for ever where there is none; what its end means."""
    over, loop = asyncio.Event(), asyncio.get_running_loop()
    if process is None:
        await over.wait()
    assert process is not None
    assert process.stdout is not None
    # It says nothing more, so there is nothing to read there but its end.
    loop.add_reader(process.stdout, over.set)
    try:
        await over.wait()
    finally:
        loop.remove_reader(process.stdout)
    return _meaning(process)


def _started(command: Sequence[str]) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
    except OSError as error:
        raise ClusterError(f"the bed's proxy cannot be started: {error.strerror}") from None


@contextlib.contextmanager
def _blamed(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """What fails inside once the proxy has ended fails for want of it; and what does not fail was
    not measured on the bed that was asked for."""
    try:
        yield
    except ClusterError as error:
        if process.poll() is not None:
            raise _meaning(process) from error
        raise
    if process.poll() is not None:
        raise _meaning(process)


def _meaning(process: subprocess.Popen[bytes]) -> ClusterError:
    code = process.wait()
    if code < 0:
        return ClusterError(f"the bed's proxy was killed by {signal.Signals(-code).name}")
    return ClusterError(f"the bed's proxy has ended with code {code}: {_said_last(process)}")


def _said_last(process: subprocess.Popen[bytes]) -> str:
    assert process.stderr is not None
    lines = process.stderr.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no reason"


def _begin(process: subprocess.Popen[bytes], orders: Orders) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(msgspec.json.encode(orders) + b"\n")
        process.stdin.flush()
    if process.stdout.readline() != b"ready\n":
        raise ClusterError(f"the bed's proxy has not started: {_said_last(process)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()  # it takes that for the end of its owner
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
