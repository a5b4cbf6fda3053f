"""A bed that stands: from its description, until the context is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from asyncspec.core.errors import ClusterError
from tools.testbed import plan
from tools.testbed.create import Network, create
from tools.testbed.description import check
from tools.testbed.plan import SWITCH, Names
from tools.testbed.ports import free_ports
from tools.testbed.proxy_process import proxy, watch
from tools.testbed.remove import remove
from tools.testbed.routes import Address, Orders, orders
from tools.testbed.state import State
from tools.testbed.tables import MAX_DEVICES, Description
from tools.testbed.wires import Way, wires

NODE_PORT = 7700
PROXY_PORT = 20_000


class Bed:
    """The devices of a description, on this machine. Made by ``Bed.open``."""

    def __init__(
        self,
        description: Description,
        standing: State,
        devices: Sequence[Address],
        reach: dict[Way, Address],
        notes: Sequence[str],
        proxy: subprocess.Popen[bytes] | None,
    ) -> None:
        self.description = description
        self.id = standing.id
        self.namespaces = standing.slot is not None
        self.limited = bool(standing.folders)
        # Where each device's node listens; the host reaches it there, unshaped and undelayed.
        self.devices = tuple(devices)
        # What of the description does not hold here, a sentence each.
        self.notes = tuple(notes)
        # A folder that goes with the bed, however it goes.
        self.scratch = Path(standing.scratch)
        self._standing = standing
        self._reach = reach
        self._proxy = proxy
        self._started: list[subprocess.Popen[Any]] = []

    @classmethod
    @contextlib.contextmanager
    def open(cls, description: Description, network: Network = "auto") -> Iterator[Bed]:
        """Make a bed; remove it, and all that runs in it, when the context is left.

        ``network``: devices as namespaces, or all on loopback; "auto" takes namespaces where they
        work, and says in ``notes`` why they do not. Raises ``ClusterError``, and ``UserError`` for
        a description that breaks the rules and for namespaces that are not to be had.
        """
        check(description)
        notes: list[str] = []
        standing = create(description, network, notes)
        try:
            devices, todo, reach = _addresses(description, standing)
            with proxy(todo, _switch(standing)) as process:
                bed = cls(description, standing, devices, reach, notes, process)
                try:
                    yield bed
                finally:
                    bed.end()
        finally:
            remove(standing)

    def reach(self, device: int, other: int) -> Address:
        """Where one device finds another: the latency and rate between them are behind it."""
        return self._reach[device, other]

    def prefix(self, device: int) -> tuple[str, ...]:
        """What stands before a command that is to run on a device; it keeps its process number."""
        return self._standing.prefixes[device]

    async def watch(self) -> ClusterError:
        """Wait until something of the bed ends by itself; what that means."""
        return await watch(self._proxy)

    def start(self, device: int, command: Sequence[str], **how: Any) -> subprocess.Popen[Any]:
        """Start a process on a device, in a session of its own; ``how`` goes to ``Popen``."""
        line = [*self.prefix(device), *command]
        process = subprocess.Popen(line, start_new_session=True, **how)
        self._started.append(process)
        return process

    def end(self) -> None:
        """End what ``start`` has started."""
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._started.clear()


def _addresses(
    description: Description, standing: State
) -> tuple[list[Address], Orders, dict[Way, Address]]:
    """Of the devices; what the proxy does; where each device finds each other one."""
    count = standing.devices
    if standing.slot is None:
        ways = list(wires(description))
        ports = free_ports(count + len(ways))
        devices = [("127.0.0.1", port) for port in ports[:count]]
        gates = {way: ("127.0.0.1", port) for way, port in zip(ways, ports[count:], strict=True)}
        return devices, *orders(description, devices, gates.__getitem__, shape_lines=True)
    names = Names(standing.id, count, standing.slot)
    devices = [(names.address(n), NODE_PORT) for n in range(count)]

    def gate(way: Way) -> Address:
        return names.address(SWITCH), PROXY_PORT + way[0] * MAX_DEVICES + way[1]

    return devices, *orders(description, devices, gate, shape_lines=False)


def _switch(standing: State) -> tuple[str, ...]:
    if standing.slot is None:
        return ()
    return plan.inside(Names(standing.id, standing.devices, standing.slot).switch)
