"""The devices that ``asyncspec plan layers`` places a target on: from options, from a file of
devices or a cluster file, or from running nodes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from asyncspec.core.cost_model.passes import interpolate
from asyncspec.core.errors import ClusterError, UserError
from asyncspec.placement.model import Connection, Device, Network, TargetCost
from asyncspec_nodes.client.client import ClusterAddress
from asyncspec_nodes.cluster import toml_file
from asyncspec_nodes.cluster.config import Above, Config, NotNegative, Port
from asyncspec_nodes.cluster.file import load
from asyncspec_nodes.cluster.placement import devices_of, draft_of
from asyncspec_nodes.console.bounds import BYTES_PER_MEGABIT, GB, GIB
from asyncspec_protocol.ids import DRAFT
from asyncspec_protocol.messages import Status


class DeviceTable(Struct, frozen=True, forbid_unknown_fields=True):
    """``[[machine]]``, or ``--machine NAME:KEY=VALUE,...``."""

    name: str
    memory_gib: Above
    # Weights that its passes read; or what a mean layer of the target takes.
    gb_per_second: Above | None = None
    layer_ms: Above | None = None
    # Its connection: one way; 0: no limit.
    latency_ms: NotNegative = 0.0
    mbit: NotNegative = 0.0
    # Where its stage listens, for --write.
    host: str = ""
    port: Port = 7701


class LinkTable(Struct, frozen=True, forbid_unknown_fields=True):
    """``[[link]]``: between two devices, in place of their own connections."""

    between: tuple[str, str]
    latency_ms: NotNegative = 0.0
    mbit: NotNegative = 0.0


class DraftNodeTable(Struct, frozen=True, forbid_unknown_fields=True):
    """``[draft]``: the device that the draft node shares, or its own connection."""

    machine: str = ""
    latency_ms: NotNegative = 0.0
    host: str = ""
    port: Port = 7700


class DevicesFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    machine: tuple[DeviceTable, ...]
    link: tuple[LinkTable, ...] = ()
    draft: DraftNodeTable = DraftNodeTable()


class Devices(Struct, frozen=True):
    """What is placed on."""

    devices: tuple[Device, ...]
    network: Network
    # By the device's name, where known: host and port of its stage.
    addresses: dict[str, tuple[str, int]] = {}
    draft_address: tuple[str, int] | None = None
    # Those whose speed is not known: they are taken for as fast as the others' mean.
    untimed: tuple[str, ...] = ()


def from_options(options: Sequence[str], target: TargetCost) -> Devices:
    """The devices of ``--machine`` options. Raises ``UserError``."""
    return _devices(DevicesFile(tuple(map(_device, options))), target)


def _device(text: str) -> DeviceTable:
    name, _, rest = text.partition(":")
    pairs = dict(part.partition("=")[::2] for part in rest.split(",") if part)
    try:
        return msgspec.convert({"name": name, **pairs}, DeviceTable, strict=False)
    except msgspec.ValidationError as error:
        raise UserError(
            f"--machine {text}: {str(error).replace('`', '')}; give for example "
            "box:memory_gib=8,gb_per_second=20,latency_ms=0.3,mbit=1000"
        ) from None


def from_file(path: Path, target: TargetCost) -> Devices:
    """The devices of a file of such, or of a cluster file's stages. Raises ``UserError``."""
    if (config := read_cluster(path)) is not None:
        return from_config(config)
    return _devices(toml_file.load(path, "the devices", _read), target)


def read_cluster(path: Path) -> Config | None:
    """The cluster file that ``path`` is; None for a file of devices. Raises ``UserError``."""
    text = toml_file.load(path, "the devices", lambda text: text)
    return None if "[[machine]]" in text else load(path)


def _read(text: str) -> DevicesFile:
    file = toml_file.decode(text, DevicesFile)
    names = {device.name for device in file.machine}
    for link in file.link:
        for name in link.between:
            if name not in names:
                raise UserError(f"[[link]] between: there is no machine {name!r}")
    if file.draft.machine and file.draft.machine not in names:
        raise UserError(f"[draft] machine: there is no machine {file.draft.machine!r}")
    return file


def from_config(config: Config) -> Devices:
    """The devices of a cluster file's stages."""
    stages = sorted((node for node in config.node if node.rank), key=lambda node: node.rank)
    draft = config.find(DRAFT)
    return Devices(
        tuple(devices_of(stages)),
        Network(draft=draft_of(config)),
        {f"rank {node.rank}": (node.host, node.port) for node in stages},
        None if draft is None else (draft.host, draft.port),
        untimed=tuple(f"rank {node.rank}" for node in stages if not node.gb_per_second),
    )


def _devices(file: DevicesFile, target: TargetCost) -> Devices:
    names = [device.name for device in file.machine]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"two machines are called {twice}; give each a name of its own")
    count = len(target.layers)
    devices = []
    for table in file.machine:
        if (table.gb_per_second is None) == (table.layer_ms is None):
            raise UserError(f"machine {table.name}: give gb_per_second or layer_ms, one of the two")
        speed = (table.gb_per_second or 0.0) * GB
        if table.layer_ms is not None:
            speed = target.speed((0, count), count * table.layer_ms / 1000)
        link = (table.latency_ms / 1000, table.mbit * BYTES_PER_MEGABIT)
        devices.append(Device(table.name, int(table.memory_gib * GIB), speed, *link))
    pairs = {
        link.between: Connection(link.latency_ms / 1000, link.mbit * BYTES_PER_MEGABIT)
        for link in file.link
    }
    draft = file.draft
    shared = next((device for device in devices if device.name == draft.machine), None)
    node = Device("the draft node", 0, 1.0, draft.latency_ms / 1000)
    return Devices(
        tuple(devices),
        Network(pairs, shared or node),
        {table.name: (table.host, table.port) for table in file.machine if table.host},
        (draft.host, draft.port) if draft.host else None,
    )


def ask(where: ClusterAddress, target: TargetCost) -> Devices:
    """The devices of running nodes. Raises ``UserError`` and ``ClusterError``."""

    async def query() -> tuple[Status, ...]:
        async with await where.connect() as client:
            return await client.nodes()

    return from_statuses(asyncio.run(query()), target)


def from_statuses(statuses: Sequence[Status], target: TargetCost) -> Devices:
    """The devices of nodes by their own reports: each with what it takes now, and its share of what
    its machine has left; half of a round trip is a link's latency. Raises ``ClusterError``."""
    stages = sorted((s for s in statuses if s.role == "verify"), key=lambda status: status.rank)
    if not stages:
        raise ClusterError("no stage is linked to the draft node; start them, then plan")
    if stages[-1].layers[1] != len(target.layers):
        raise UserError(
            f"the cluster's target has {stages[-1].layers[1]} layers and --target "
            f"{len(target.layers)}; name the same model"
        )
    on_host = Counter(status.host for status in stages)
    on_device = Counter((status.host, status.device) for status in stages)
    devices = []
    for status in stages:
        if not status.pass_rows:
            raise ClusterError(f"stage {status.rank} reports no pass times; upgrade it")
        seconds = interpolate(status.pass_rows, status.pass_seconds)(1)
        held, free, nodes_there = status.memory_bytes, status.free_bytes, on_host[status.host]
        if status.device_held_bytes:
            held, free = status.device_held_bytes, status.device_free_bytes
            nodes_there = on_device[status.host, status.device]
        memory = held + free // nodes_there
        devices.append(Device(_name(status), memory, target.speed(status.layers, seconds)))
    return Devices(tuple(devices), Network(_measured_links(statuses)))


def _name(status: Status) -> str:
    if status.role == "draft":
        return "draft"
    return f"{status.host} (rank {status.rank})" if status.host else f"rank {status.rank}"


def _measured_links(statuses: Sequence[Status]) -> dict[tuple[str, str], Connection]:
    """Every pair; of two that have no link, the longer of their ways to the draft node."""
    nodes = {status.rank: status for status in statuses if status.role in ("draft", "verify")}
    one_way: dict[tuple[int, int], float] = {}
    for status in nodes.values():
        for peer, trip in zip(status.peers, status.round_trips, strict=True):
            if trip >= 0:
                key = (min(peer, status.rank), max(peer, status.rank))
                one_way[key] = min(trip / 2, one_way.get(key, trip))
    pairs = {}
    ranks = sorted(nodes)
    for i, first in enumerate(ranks):
        for second in ranks[i + 1 :]:
            detour = max(one_way.get((0, first), 0.0), one_way.get((0, second), 0.0))
            latency = one_way.get((first, second), detour)
            pairs[_name(nodes[first]), _name(nodes[second])] = Connection(latency)
    return pairs
