"""The parent of a node's process: it has imported what the node needs, and forks it again when it
has crashed.

A node loads again in the time that its weights take, which are in the system's page cache:
importing torch takes seconds more. The parent holds the listening sockets, so those that dial wait
meanwhile. It passes signals on and ends with its node's exit code; a node whose parent is killed
ends too.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from msgspec import Struct

from asyncspec_nodes.cluster.control_groups import MemoryKills
from asyncspec_nodes.console.signals import SIGNALS

SUPERVISES = sys.platform == "linux"
"""Other systems' libraries do not survive a fork."""

RESTARTS = 3
PERIOD_SECONDS = 600.0
"""So many new starts within so many seconds."""

PAUSE_SECONDS = 0.1
"""Before the second new start within the period; doubled with each."""

MOST_PAUSE_SECONDS = 30.0
"""Before a new start of a node that ends again and again with requests in hand: less than clients
wait for a draft node (``client.engine``)."""

HUNG_SECONDS = 15.0
"""A node that is stopped (SIGSTOP) for so long, or serves and says nothing, as its event loop
hangs, is killed: nobody else would start it again. Busy cores delay it by less."""

Again = Literal["", "ended", "oom_killed", "crashed"]
"""How the process that was a node before has ended: in some way; while it had requests, by the
kernel for want of memory, or by its own fault. Empty: there was none."""

FAULTS = frozenset(
    -signum
    for signum in (
        *(signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS),
        *(signal.SIGILL, signal.SIGFPE, signal.SIGSYS),
    )
)
"""Exit codes of processes that the system ends for what they did."""

_PR_SET_PDEATHSIG = 1


def how_ended(code: int, *, in_hand: bool, out_of_memory: bool) -> Again:
    """From its exit code, and whether it had a request ``in_hand``."""
    if not in_hand:
        return "ended"
    if code == -signal.SIGKILL and out_of_memory:
        return "oom_killed"
    return "crashed" if code == 1 or code in FAULTS else "ended"


class RestartBudget(Struct):
    """New starts of one node, whatever watches it: its parent, or a cluster here. Pure."""

    max_starts: int = RESTARTS
    taken: list[float] = []
    # Those of a node that had a request in hand.
    beside: list[float] = []

    def take(self, now: float, *, in_hand: bool = False) -> float | None:
        """Seconds to wait before a new start at ``now``; None where none is left. A node that had
        a request ``in_hand`` has its new start in any case, if ever later: a request may be the
        cause, which is no reason to stop for the others. Such a request is not tried for ever
        (``core.stats.MAX_BREAKS``), nor is its key heard if it sends more (``http.keys``)."""
        starts = self.beside if in_hand else self.taken
        starts[:] = [at for at in starts if now - at <= PERIOD_SECONDS]
        if not in_hand and len(starts) >= self.max_starts:
            return None
        earlier = len(starts)
        starts.append(now)
        return min(MOST_PAUSE_SECONDS, PAUSE_SECONDS * 2 ** (earlier - 1)) if earlier else 0.0


class Supervisor:
    """Forks the node, and waits for its end."""

    def __init__(
        self,
        restarts: int,
        log: Any,
        closing: Sequence[Callable[[], None]],
        *,
        stopped_seconds: float = HUNG_SECONDS,
    ) -> None:
        """``closing``: close the listening sockets, of which the node has copies of its own."""
        self._stopped_seconds = stopped_seconds
        self._budget = RestartBudget(restarts)
        self._log = log
        self._closing = closing
        self._node = 0
        self._stopping = False
        # Signals that came while there was no node to pass them to.
        self._waiting: list[int] = []
        # The node's process writes a byte to the second once it serves.
        self._ready, self._serves = os.pipe2(os.O_NONBLOCK)
        # Shared with the node's process: 1 while it has a request.
        self._in_hand = mmap.mmap(-1, 1)
        self._kills = MemoryKills()
        # How the process before has ended.
        self.again: Again = ""
        self._woken, self._wakes = os.pipe2(os.O_NONBLOCK)

    def run(self, node: Callable[[], int]) -> int:
        """The exit code of ``node``, which is called in a process of its own."""
        handlers = {signum: signal.getsignal(signum) for signum in SIGNALS}
        for signum in SIGNALS:
            if handlers[signum] is not signal.SIG_IGN:  # SIGHUP is ignored under nohup
                signal.signal(signum, self._pass_on)
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        served = False
        while True:
            if self._fork(handlers):
                code = node()
                with contextlib.suppress(OSError):  # their reader may be gone
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code)
            code = self._wait()
            served = served or bool(select.select([self._ready], [], [], 0)[0])
            # Before it has served, or for a user's mistake, a new start would only fail again.
            if self._stopping or code in (0, 2) or not served:
                return self._last(code)
            why = _reason(code)
            in_hand = self._in_hand[0] == 1
            self._in_hand[0] = 0
            self.again = how_ended(code, in_hand=in_hand, out_of_memory=self._kills.risen)
            if self.again == "oom_killed":
                why = "the kernel ended it for want of memory"
            pause = self._budget.take(time.monotonic(), in_hand=in_hand)
            if pause is None:
                self._log.error(
                    "stopping", why=f"{why}, after {self._budget.max_starts} new starts"
                )
                return 1
            self._log.warning("the node is started again", why=why, seconds=pause)
            select.select([self._woken], [], [], pause)
            if self._stopping:
                return 0

    def serves(self) -> None:
        """In the node's process: it has loaded."""
        os.write(self._serves, b"r")

    def in_hand(self, some: bool) -> None:
        """In the node's process: it has a request, or none now."""
        self._in_hand[0] = int(some)

    def _wait(self) -> int:
        """The exit code of the node. A wait for the process alone would miss a signal that comes
        between Python's last look for one and the system call."""
        ends, step, stopped = os.pidfd_open(self._node), self._stopped_seconds / 5, 0.0
        self._kills.look(Path(f"/proc/{self._node}/cgroup"), time.monotonic())
        while ends not in (ready := select.select([ends, self._woken], [], [], step)[0]):
            self._kills.look(Path(f"/proc/{self._node}/cgroup"), time.monotonic())
            if self._woken in ready:
                os.read(self._woken, 4096)
                continue
            # Counted by looks, as this process may be stopped as well.
            stopped = stopped + step if self._is_stopped() else 0.0
            if stopped > self._stopped_seconds:
                self._log.warning("the node has been stopped", seconds=self._stopped_seconds)
                os.kill(self._node, signal.SIGKILL)
                stopped = 0.0
        os.close(ends)
        node, self._node = self._node, 0
        return os.waitstatus_to_exitcode(os.waitpid(node, 0)[1])

    def _is_stopped(self) -> bool:
        """Whether the node's process is stopped by a signal."""
        stat = Path(f"/proc/{self._node}/stat").read_text(encoding="utf-8")
        return stat.rpartition(")")[2].split()[0] == "T"

    def _last(self, code: int) -> int:
        if code < 0:
            self._log.error("stopping", why=_reason(code))
        return code if code >= 0 else 1

    def _fork(self, handlers: dict[signal.Signals, Any]) -> bool:
        """True in the new process, where signals are what they were."""
        parent = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self._node = os.fork()
        if not self._node:
            # Ctrl-C in the terminal signals only the parent, which passes it on.
            os.setsid()
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            signal.set_wakeup_fd(-1)
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
        else:
            for missed in self._waiting:
                os.kill(self._node, missed)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return not self._node

    def _pass_on(self, signum: int, frame: FrameType | None) -> None:
        self._stopping = True
        for close in self._closing:
            close()
        if self._node:
            os.kill(self._node, signum)
        else:
            self._waiting.append(signum)


def _reason(code: int) -> str:
    if code < 0:
        return f"it was killed by {signal.Signals(-code).name}"
    return f"it has ended with code {code}"
