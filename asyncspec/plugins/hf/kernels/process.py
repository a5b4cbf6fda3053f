"""Process-wide state of libraries: what transformers imports, its log output, free memory of the C
heap."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
"""torch's compiler, which transformers imports for decorators that mark functions for it."""

_STOOD_IN = (_COMPILER, f"{_COMPILER}._trace_wrapped_higher_order_op")
"""Modules that a stand-in replaces."""


@contextmanager
def light_imports() -> Iterator[None]:
    """Within it transformers is imported without torch's compiler and tensors of several devices:
    nodes need neither, and they are a third of what a start imports (1.2 s of processor time).
    Functions of the compiler are imported when they are called; decorators change nothing. Without
    effect where the compiler is there already."""
    import torch.distributed

    if _COMPILER in sys.modules:
        yield
        return
    is_available = torch.distributed.is_available
    sys.modules.update({name: _StandIn(name) for name in _STOOD_IN})
    torch.distributed.is_available = lambda: False
    try:
        yield
    finally:
        torch.distributed.is_available = is_available
        _remove_stand_ins()


class _StandIn(ModuleType):
    """A module whose every name is a function that imports the real one when it is called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if args and args[0] is None:
                return lambda function: function  # a decorator's arguments
            if args and callable(args[0]):
                return args[0]  # a decorator's function
            _remove_stand_ins()
            return getattr(import_module(self.__name__), name)(*args, **kwargs)

        return call


def _remove_stand_ins() -> None:
    for name in _STOOD_IN:
        if isinstance(sys.modules.get(name), _StandIn):
            del sys.modules[name]


def quiet_transformers() -> None:
    """No progress bars and load reports of transformers in this process from now on."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


TRIM_BYTES = 16 << 20
"""Freed bytes from which on a trim of the heap is worth the milliseconds it takes."""

_freed = 0


def free_heap(count: int) -> None:
    """Count freed bytes; from ``TRIM_BYTES`` on return free memory to the system (``malloc_trim``).

    Tensors below 32 MiB come from the C heap, which shrinks from its end only: a small object that
    outlives a session keeps the session's cache. Caches of short sessions count together.
    """
    global _freed
    _freed += count
    if _freed < TRIM_BYTES:
        return
    _freed = 0
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
