"""A placement written into a cluster file: comments and all other keys stay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from asyncspec.core.errors import UserError, reading, writing
from asyncspec.core.placement.model import Placement
from asyncspec_nodes.cluster.config import Config, NodeTable, TargetTable
from asyncspec_nodes.cluster.file import parse, to_toml

Address = tuple[str, int]


def write(
    path: Path,
    target: str,
    placement: Placement,
    addresses: Mapping[str, Address],
    draft: Address | None,
) -> None:
    """Into a file that exists, or a new one. Raises ``UserError``."""
    if path.exists():
        with reading(f"the cluster file {path}"):
            text = path.read_text(encoding="utf-8")
        try:
            text = _changed(text, placement, addresses)
            parse(text)
        except (TOMLKitError, UserError) as error:
            raise UserError(f"{path}: {error}") from None
    else:
        text = _new(path, target, placement, addresses, draft)
    with writing(f"the cluster file {path}"):
        path.write_text(text, encoding="utf-8")


def _changed(text: str, placement: Placement, addresses: Mapping[str, Address]) -> str:
    """Stages are found by their addresses, or ``rank N`` in their devices' names; those of devices
    that were left out are removed. Raises ``UserError``."""
    document = tomlkit.parse(text)
    nodes: Any = document.get("node", [])
    stages = [node for node in nodes if node.get("rank")]
    by_address = {(node.get("host"), node.get("port")): node for node in stages}
    kept = []
    for rank, stage in enumerate(placement.stages, start=1):
        node = by_address.get(addresses.get(stage.device.name, ("", 0)))
        if node is None:
            node = next((n for n in stages if _names(stage.device.name, n["rank"])), None)
        if node is None and len(stages) == len(placement.stages) and not addresses:
            node = stages[rank - 1]
        if node is None:
            raise UserError(
                f"no [[node]] table is {stage.device.name}: give the device the host and port of "
                "its stage"
            )
        kept.append((rank, node, stage.layers))
    for rank, node, layers in kept:
        node["rank"] = rank
        node["layers"] = list(layers)
    for node in stages:
        if not any(node is one for _, one, _ in kept):
            nodes.remove(node)
    if "stages" in document.get("cluster", {}):
        document["cluster"]["stages"] = len(kept)
    return tomlkit.dumps(document)


def _names(device: str, rank: int) -> bool:
    return device == f"rank {rank}" or device.endswith(f"(rank {rank})")


def _new(
    path: Path,
    target: str,
    placement: Placement,
    addresses: Mapping[str, Address],
    draft: Address | None,
) -> str:
    missing = [s.device.name for s in placement.stages if s.device.name not in addresses]
    if draft is None or missing:
        which = f"machine {missing[0]}" if missing else "[draft]"
        raise UserError(f"{path} does not exist, and to make it {which} needs a host")
    nodes = [NodeTable(0, *draft)]
    for rank, stage in enumerate(placement.stages, start=1):
        nodes.append(NodeTable(rank, *addresses[stage.device.name], layers=stage.layers))
    return to_toml(Config(target=TargetTable(path=target), node=tuple(nodes)))
