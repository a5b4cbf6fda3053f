"""Where a node's peers are: as the cluster file says at the time of a dial, so that a node may move
while the others run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from asyncspec.actor.mesh import Address
from asyncspec.core.errors import AsyncSpecError
from asyncspec_nodes.cluster.config import Config
from asyncspec_nodes.cluster.file import load
from asyncspec_protocol.ids import Rank


class PeerAddresses(Mapping[Rank, Address]):
    """By rank; the ranks stay those of the first reading."""

    def __init__(self, config: Config, file: Path | None) -> None:
        self._file = file
        # Of the file when it was read here, in ns: it may have changed since ``config`` was.
        self._read_at: int | None = None
        self._addresses = _addresses(config)

    def __getitem__(self, rank: Rank) -> Address:
        if self._file is not None:
            # A file that is wrong now, or gone, changes nothing.
            with suppress(AsyncSpecError, OSError):
                modified = self._file.stat().st_mtime_ns
                if modified != self._read_at:
                    self._read_at = modified
                    self._addresses |= _addresses(load(self._file))
        return self._addresses[rank]

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._addresses)

    def __len__(self) -> int:
        return len(self._addresses)


def _addresses(config: Config) -> dict[Rank, Address]:
    return {Rank(node.rank): (node.host, node.port) for node in config.nodes}
