"""The proxy as a child: started where the bed has its switch, gone when its owner is."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from asyncspec.errors import ClusterError
from tools.testbed.routes import Orders

MAIN = Path(__file__).parent / "__main__.py"
STOP_SECONDS = 5.0


@contextlib.contextmanager
def proxy(orders: Orders, prefix: Sequence[str]) -> Iterator[None]:
    """Inside, all routes listen. Without routes there is no process. Raises ``ClusterError``."""
    if not orders.routes:
        yield
        return
    command = [*prefix, sys.executable, str(MAIN), "proxy"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            _begin(process, orders)
            yield
        finally:
            _end(process)


def _begin(process: subprocess.Popen[bytes], orders: Orders) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(msgspec.json.encode(orders) + b"\n")
        process.stdin.flush()
    if process.stdout.readline() != b"ready\n":
        lines = process.stderr.read().decode(errors="replace").strip().splitlines()
        raise ClusterError(
            f"the bed's proxy has not started: {lines[-1] if lines else 'no reason'}"
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()  # it takes that for the end of its owner
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
