"""The tables of a bed file, one sentence a key. Pure."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from asyncspec_nodes.cluster.config import PaceTable

MAX_DEVICES = 16

Mbit = Annotated[float, Meta(ge=0.1, le=100_000)]
Milliseconds = Annotated[float, Meta(ge=0, le=60_000)]
Cores = Annotated[float, Meta(ge=0.01, le=1024)]


class NetworkTable(Struct, frozen=True, forbid_unknown_fields=True):
    """``[network]``: what holds for every device and link that says nothing else."""

    # Rate of each device's line to the switch, each way, in Mbit/s; left out: unlimited.
    mbit: Mbit | None = None
    # Time on the way from any device to any other, one way.
    latency_ms: Milliseconds = 0.0
    # At most this is added to the latency, evenly drawn for every burst.
    jitter_ms: Milliseconds = 0.0


class DeviceTable(Struct, frozen=True, forbid_unknown_fields=True):
    """``[[device]]``: in the file's order device 0 (drafts), 1, 2, ..."""

    # Rate of this device's line, each way, and of either way alone, in Mbit/s.
    mbit: Mbit | None = None
    up_mbit: Mbit | None = None
    down_mbit: Mbit | None = None
    # Processor time: this many cores at most (cgroup quota); left out: no limit.
    cpu: Cores | None = None
    # Main memory at most, in MiB (cgroup limit); left out: no limit.
    memory_mib: Annotated[int, Meta(ge=16)] | None = None
    # Where compute must not contend: how long its passes take, whatever they really take. As in a
    # cluster file's ``[pace.RANK]``.
    pace: PaceTable | None = None


class LinkTable(Struct, frozen=True, forbid_unknown_fields=True):
    """``[[link]]``: the way between two devices, where it differs from ``[network]``."""

    # Two devices by number.
    between: tuple[int, int]
    # Only the way from the first to the second; else both ways.
    one_way: bool = False
    # Rate of this way, besides the rates of both lines, in Mbit/s.
    mbit: Mbit | None = None
    # As in [network].
    latency_ms: Milliseconds | None = None
    jitter_ms: Milliseconds | None = None


class Description(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    device: tuple[DeviceTable, ...]
    # What the bed stands for, in a line.
    about: str = ""
    # Of the jitter.
    seed: int = 0
    network: NetworkTable = NetworkTable()
    link: tuple[LinkTable, ...] = ()
