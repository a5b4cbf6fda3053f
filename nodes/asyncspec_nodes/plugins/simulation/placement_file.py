"""A placement written into a cluster file: comments and all other keys stay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomlkit
from msgspec.structs import replace
from tomlkit import TOMLDocument
from tomlkit.exceptions import TOMLKitError

from asyncspec.core.errors import UserError, reading, writing
from asyncspec.placement.model import Placement
from asyncspec_nodes.cluster.config import Config, NodeTable
from asyncspec_nodes.cluster.file import load, parse, to_toml
from asyncspec_protocol.ids import is_draft

Address = tuple[str, int]

_TAKES = {
    "target": ("path", "dtype", "mode", "quantize", "device", "kv_type"),
    "llama": ("gpu_layers", "kv_type", "device"),
    "limits": ("sessions",),
}
"""Keys that decide what a stage takes, by their tables."""


def write(
    path: Path,
    planned: Config,
    placement: Placement,
    addresses: Mapping[str, Address],
    draft: Address | None,
) -> None:
    """Into a file that exists and has the same target, or a new one, with what was ``planned`` of
    the target and its sessions. Raises ``UserError``."""
    if path.exists():
        _check_same(path, planned)
        with reading(f"the cluster file {path}"):
            text = path.read_text(encoding="utf-8-sig")
        try:
            text = _changed(text, placement, addresses)
            parse(text)
        except (TOMLKitError, UserError) as error:
            raise UserError(f"{path}: {error}") from None
    else:
        text = _new(path, planned, placement, addresses, draft)
    with writing(f"the cluster file {path}"):
        path.write_text(text, encoding="utf-8")


def _check_same(path: Path, planned: Config) -> None:
    """Raises ``UserError`` where stages of the file take other memory than the planned ones."""
    there = load(path)
    for table, keys in _TAKES.items():
        written, plan = getattr(there, table), getattr(planned, table)
        for key in keys:
            has, wanted = getattr(written, key), getattr(plan, key)
            if has != wanted:
                raise UserError(
                    f"{path}: [{table}] {key} is {has}, and the plan is for {wanted}; plan for the "
                    "same, or change the file first"
                )


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
    moved = {int(node["rank"]): rank for rank, node, _ in kept}
    if "source" in document:  # a node behind the last stage
        moved[len(stages) + 1] = len(kept) + 1
    _move_paces(document, moved)
    for rank, node, layers in kept:
        node["rank"] = rank
        node["layers"] = list(layers)
    for node in stages:
        if not any(node is one for _, one, _ in kept):
            nodes.remove(node)
    if "stages" in document.get("cluster", {}):
        document["cluster"]["stages"] = len(kept)
    return tomlkit.dumps(document)


def _move_paces(document: TOMLDocument, ranks: Mapping[int, int]) -> None:
    """Paces stay with their nodes, whose new ``ranks`` these are; those of stages that were left
    out go."""
    paces: Any = document.get("pace")
    if paces is None:
        return
    tables = {int(rank): table for rank, table in paces.items()}
    kept = {ranks.get(rank, rank): rank for rank in tables if rank in ranks or is_draft(rank)}
    if kept == {rank: rank for rank in tables}:
        return
    # Tables of the file that do not follow each other cannot be changed one by one.
    document.remove("pace")
    moved = tomlkit.table(is_super_table=True)
    for rank in sorted(kept):
        moved.append(str(rank), tables[kept[rank]])
    if kept:
        document.append("pace", moved)


def _names(device: str, rank: int) -> bool:
    return device == f"rank {rank}" or device.endswith(f"(rank {rank})")


def _new(
    path: Path,
    planned: Config,
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
    return to_toml(replace(planned, node=tuple(nodes)))
