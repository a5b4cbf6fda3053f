"""What of a bed works on this machine: by making a small one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tools.testbed import cgroups
from tools.testbed.bed import Bed
from tools.testbed.tables import Description, DeviceTable, NetworkTable

TRIAL = Description(
    device=(DeviceTable(cpu=0.5), DeviceTable(memory_mib=64)),
    network=NetworkTable(mbit=100, latency_ms=1),
)


def check() -> Iterator[str]:
    """A line for each thing."""
    with Bed.open(TRIAL) as bed:
        yield f"network   {_network(bed)}"
        yield f"limits    {_limits(bed)}"
        yield "pace      works everywhere: nodes wait out what is left of their time"
        for note in bed.notes:
            yield f"missing   {note}"


def _network(bed: Bed) -> str:
    if bed.namespaces:
        return "a namespace for each device, rates by tc tbf, latency and jitter by a proxy"
    return "all devices on loopback; rates, latency and jitter by a proxy"


def _limits(bed: Bed) -> str:
    found = cgroups.detect(Path("/proc/mounts").read_text())
    if found is None:
        return "none: no cgroups are mounted"
    if not bed.limited:
        return "none"
    names = [n for n, path in (("cpu", found.cpu), ("memory_mib", found.memory)) if path]
    return f"{' and '.join(names) or 'none'} by cgroups, version {found.version}"
