"""Every Python that finds this on its path takes itself for one on macOS: what Linux alone has is
missing, and ``psutil`` answers without /proc, as its C code does there."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import resource
import select
import selectors
import signal
import socket
import sys
import sysconfig
from types import SimpleNamespace
from typing import Any

with contextlib.redirect_stderr(io.StringIO()):  # it says that there is no /proc/stat
    import psutil

MISSING: tuple[tuple[Any, str], ...] = (
    *((os, f"sched_{name}") for name in ("getaffinity", "setaffinity", "getscheduler")),
    *((os, name) for name in ("copy_file_range", "eventfd", "memfd_create", "pidfd_open")),
    *((os, name) for name in ("pipe2", "posix_fadvise", "posix_fallocate", "splice")),
    (os, "getrandom"),
    *((select, name) for name in dir(select) if name.lower().startswith("epoll")),
    (selectors, "EpollSelector"),
    *((signal, name) for name in ("SIGPWR", "SIGRTMAX", "SIGRTMIN", "SIGSTKFLT", "sigtimedwait")),
    *((socket, name) for name in ("AF_NETLINK", "AF_PACKET", "AF_VSOCK", "SO_BINDTODEVICE")),
    *((socket, name) for name in ("SO_PEERCRED", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "TCP_CORK")),
    *((socket, name) for name in ("TCP_INFO", "TCP_KEEPIDLE", "TCP_QUICKACK", "TCP_USER_TIMEOUT")),
)


def _hide() -> None:
    for module, name in MISSING:
        if hasattr(module, name):
            delattr(module, name)
    selectors.DefaultSelector = selectors.PollSelector  # type: ignore[assignment, misc]
    sys.modules["uvloop"] = None  # type: ignore[assignment]
    socketpair = socket.socketpair

    def without_packets(*arguments: Any, **more: Any) -> Any:
        if socket.SOCK_SEQPACKET in (*arguments, *more.values()):
            raise OSError(43, "Protocol not supported")
        return socketpair(*arguments, **more)

    socket.socketpair = without_packets


def _no_proc(event: str, arguments: tuple[Any, ...]) -> None:
    """The namespace keeps /proc/cpuinfo, which torch's library for Linux reads by itself."""
    if event in ("open", "os.listdir", "os.scandir"):
        path = arguments[0]
        text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
        if text.startswith(("/proc/", "/sys/")):
            raise FileNotFoundError(2, "No such file or directory", text)


class _Process:
    def memory_info(self) -> SimpleNamespace:
        return SimpleNamespace(rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def _measure() -> None:
    """What asyncspec asks ``psutil`` for beside network interfaces, which it knows by itself."""
    page = os.sysconf("SC_PAGE_SIZE")
    memory = SimpleNamespace(
        total=os.sysconf("SC_PHYS_PAGES") * page, available=os.sysconf("SC_AVPHYS_PAGES") * page
    )
    psutil.virtual_memory = lambda: memory
    psutil.cpu_count = lambda logical=True: os.sysconf("SC_NPROCESSORS_ONLN")
    psutil.Process = _Process


# What is imported later asks macOS for proxies by a module that only macOS has.
importlib.import_module("urllib.request")
sysconfig.get_config_vars()  # from a file that is named after sys.platform
_hide()
_measure()
sys.addaudithook(_no_proc)
sys.platform = "darwin"
