"""A bed of namespaces as data: its names, its addresses, and the commands that make and remove it.
Pure.

A switch namespace holds a bridge; every device is a namespace with one veth into it, as is the host
itself, whose clients are neither shaped nor delayed. Nothing else is visible from outside: no two
beds, and no firewall's rules for forwarding, can meet in there.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from tools.testbed.wires import BYTES_PER_MBIT, Line

Command = tuple[str, ...]

NETWORK = "198.18"
"""Set aside for measurements between networks (RFC 2544); a bed takes 198.18.SLOT.0/24."""

SLOTS = 256
HOST, SWITCH = 253, 254
"""Last part of the host's address in the bed, and of the proxies'."""

FRAME_OVERHEAD = 24
"""Preamble, check sum and gap of an Ethernet frame, which tbf does not see."""

MIN_BURST = 3100
"""Two frames."""

PACKET = 68_750
"""Bytes of the largest packet, and some."""

QUEUE = "50ms"
"""How long a frame may wait for its turn before it is dropped."""


class Names(Struct, frozen=True):
    """The names of one bed, all from its id (at most 10 characters: interfaces have 15)."""

    id: str
    devices: int
    # Which network it has.
    slot: int

    @property
    def switch(self) -> str:
        """The namespace with the bridge and the proxies."""
        return f"{self.id}-sw"

    @property
    def host(self) -> str:
        """The host's interface into the bed."""
        return self.id

    def device(self, number: int) -> str:
        """A device's namespace, and its cgroup."""
        return f"{self.id}-{number}"

    @property
    def namespaces(self) -> tuple[str, ...]:
        """All of them."""
        return (self.switch, *(self.device(n) for n in range(self.devices)))

    def address(self, number: int) -> str:
        """Of a device, or ``HOST`` or ``SWITCH``."""
        last = number if number in (HOST, SWITCH) else number + 1
        return f"{NETWORK}.{self.slot}.{last}"


def burst(mbit: float) -> int:
    """Bytes a line may send at once after a pause: as few as the kernel's timers allow.

    A timer that comes late costs rate unless the bucket is as deep as its lateness. Up to 125
    Mbit/s a quarter of a millisecond is deep enough, from 250 on half of one. From 500 on the
    bucket holds one of the 64 KiB packets that the kernel else has to cut up, at a processor's
    expense, and no more of them: a segment of some rows is not to pass at once.
    """
    rate = mbit * BYTES_PER_MBIT
    if mbit > 500:
        return int(max(PACKET, rate * 0.00055))
    return max(MIN_BURST, int(rate * max(0.00025, 0.0022 * mbit / 1000)))


def up(names: Names, lines: Sequence[Line]) -> list[Command]:
    """The commands that make the bed."""
    switch = ("ip", "-n", names.switch)
    commands: list[Command] = [("ip", "netns", "add", space) for space in names.namespaces]
    commands += [
        (*switch, "link", "set", "lo", "up"),
        (*switch, "link", "add", "br0", "type", "bridge"),
        (*switch, "addr", "add", f"{names.address(SWITCH)}/24", "dev", "br0"),
        (*switch, "link", "set", "br0", "up"),
    ]
    for number, line in enumerate(lines):
        commands += _device(names, number, line)
    commands += [
        (
            "ip",
            "link",
            "add",
            names.host,
            "type",
            "veth",
            "peer",
            "name",
            "host",
            "netns",
            names.switch,
        ),
        ("ip", "addr", "add", f"{names.address(HOST)}/24", "dev", names.host),
        ("ip", "link", "set", names.host, "up"),
        (*switch, "link", "set", "host", "master", "br0", "up"),
    ]
    return commands


def _device(names: Names, number: int, line: Line) -> list[Command]:
    space, port = names.device(number), f"d{number}"
    switch, device = ("ip", "-n", names.switch), ("ip", "-n", space)
    commands: list[Command] = [
        (*switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space),
        (*switch, "link", "set", port, "master", "br0", "up"),
        (*device, "addr", "add", f"{names.address(number)}/24", "dev", "eth0"),
        (*device, "link", "set", "lo", "up"),
        (*device, "link", "set", "eth0", "up"),
    ]
    if line.up is not None:
        commands.append(_shape(space, "eth0", line.up))
    if line.down is not None:
        commands.append(_shape(names.switch, port, line.down))
    return commands


def _shape(space: str, interface: str, mbit: float) -> Command:
    """A rate for what an interface sends, counted as on a real cable."""
    where = ("tc", "-n", space, "qdisc", "add", "dev", interface, "root")
    rate = f"{round(mbit * 1000)}kbit"
    bucket = ("burst", str(burst(mbit)), "latency", QUEUE, "overhead", str(FRAME_OVERHEAD))
    return (*where, "tbf", "rate", rate, *bucket)


def down(names: Names) -> list[Command]:
    """The commands that remove the bed, of which any may find nothing. A namespace takes its
    interfaces along, but later: the host's end goes by itself."""
    commands: list[Command] = [("ip", "link", "del", names.host)]
    commands += [("ip", "netns", "del", space) for space in names.namespaces]
    return commands


def inside(space: str) -> Command:
    """What stands before a command that is to run in a namespace."""
    return ("ip", "netns", "exec", space)
