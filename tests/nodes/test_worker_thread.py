"""Work beside the event loop: the thread, and its stand-in in tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from asyncspec_nodes.node.host import WorkerThread
from asyncspec_nodes.serving.service import WorkQueue
from nodes.manual_thread import ManualThread


async def reported(queue: WorkQueue, pieces: list[Callable[[], Any]]) -> list[object]:
    """What is told of pieces of work that are submitted at once, in the order it is told."""
    received: list[object] = []
    all_told = asyncio.Event()
    loop_thread = threading.current_thread()

    def hear(what: object) -> None:
        assert threading.current_thread() is loop_thread
        received.append(what)
        if len(received) == len(pieces):
            all_told.set()

    for number, piece in enumerate(pieces):
        queue.submit(piece, hear, partial(hear, f"{number} failed"))
    assert received == []
    if isinstance(queue, ManualThread):
        queue.run()
    await all_told.wait()
    return received


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [ManualThread, partial(WorkerThread, "test")])
async def test_results_come_in_order(kind: Callable[[], WorkQueue]) -> None:
    queue = kind()
    errors: list[BaseException] = []
    done: list[int] = []

    def broken() -> None:
        raise RuntimeError("broken")

    def piece(number: int) -> int:
        assert done == list(range(number))  # one at a time
        done.append(number)
        return number

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
    pieces = [partial(piece, 0), partial(piece, 1), broken, partial(piece, 2)]
    assert await reported(queue, pieces) == [0, 1, "2 failed", 2]
    assert isinstance(queue, ManualThread | WorkerThread)
    found = queue.errors if isinstance(queue, ManualThread) else errors
    assert [str(error) for error in found] == ["broken"]


@pytest.mark.asyncio
async def test_the_loop_goes_on_meanwhile() -> None:
    queue, begun, go = WorkerThread("test"), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def work() -> bool:
        loop.call_soon_threadsafe(begun.set)
        return go.wait(240)

    ended: asyncio.Future[bool] = loop.create_future()
    queue.submit(work, ended.set_result, ended.cancel)
    await begun.wait()
    assert not ended.done()
    go.set()
    assert await ended


def test_a_loop_that_ends_does_not_wait(caplog: pytest.LogCaptureFixture) -> None:
    """A node that is told to stop while a long prompt is read."""
    begun, go, second = threading.Event(), threading.Event(), threading.Event()
    received: list[bool] = []

    def first() -> bool:
        begun.set()
        return go.wait(240)

    def next_one() -> bool:
        second.set()
        return True

    async def node() -> None:
        queue = WorkerThread("test")
        for work in (first, next_one):
            queue.submit(work, received.append, received.clear)
        await asyncio.get_running_loop().run_in_executor(None, begun.wait)

    asyncio.run(node())
    go.set()
    assert second.wait(240)  # what the first has come to was told by then, if to anybody
    assert received == []
    assert caplog.records == []
