"""The event loop: uvloop where it exists, asyncio's own elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from importlib.util import find_spec
from typing import Any, TypeVar

T = TypeVar("T")


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """How to make an event loop here."""
    if find_spec("uvloop") is None:
        return asyncio.new_event_loop
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` to its end on a fresh loop."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main)
