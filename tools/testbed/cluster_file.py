"""The cluster files of a bed: each device has its own, with the addresses as it sees them. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from asyncspec.core.errors import UserError
from asyncspec_nodes.cluster.config import Config, PaceTable
from asyncspec_nodes.cluster.file import check_pace, to_toml
from asyncspec_protocol.links import role_of
from tools.testbed.routes import Address
from tools.testbed.tables import Description


def check_fit(description: Description, config: Config) -> None:
    """Every device is one node, and has one pace, which is of what the node does. Raises
    ``UserError``."""
    devices, nodes = len(description.device), len(config.nodes)
    if devices != nodes:
        raise UserError(
            f"the bed has {devices} devices, the cluster {nodes} nodes ({config.stages} stages); "
            "change --stages or take another bed"
        )
    for rank, device in enumerate(description.device):
        if device.pace is not None:
            _check_pace(rank, device.pace, config)


def _check_pace(rank: int, pace: PaceTable, config: Config) -> None:
    where, role = f"device[{rank}].pace", role_of(rank, config.stages)
    check_pace(where, pace, role)
    if role == "draft" and config.source is not None:
        raise UserError(
            f"{where}: device {config.stages + 1} drafts (--source-apart); move it there"
        )
    if rank in config.pace:
        options = "--draft-seconds and --call-seconds"
        if role == "verify":
            options = "--stage-seconds, --plateau and --row-seconds"
        raise UserError(f"{where}: the bed says how slow it is; leave {options} out, or remove it")


def addressed(config: Config, addresses: list[Address]) -> Config:
    """The cluster with these addresses, by rank. A bed trusts who is in it."""
    nodes = tuple(
        replace(node, host=addresses[node.rank][0], port=addresses[node.rank][1])
        for node in config.node
    )
    source = config.source
    if source is not None:
        host, port = addresses[config.stages + 1]
        source = replace(source, host=host, port=port)
    return replace(
        config, cluster=replace(config.cluster, insecure=True), node=nodes, source=source
    )


def cluster_file(config: Config, addresses: list[Address], description: Description) -> str:
    """The text of one device's file: the cluster, and the pace of its devices, which have the
    numbers of the ranks."""
    devices = enumerate(description.device)
    pace = {rank: device.pace for rank, device in devices if device.pace is not None}
    return to_toml(replace(addressed(config, addresses), pace=config.pace | pace))
