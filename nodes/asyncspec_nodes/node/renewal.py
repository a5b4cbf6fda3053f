"""What is read again while a node runs: where its peers are, by the cluster file at the time of a
dial, so that a node may move while the others run; certificates and revocation lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from asyncspec.actor.mesh import Address, Security
from asyncspec.core.errors import AsyncSpecError
from asyncspec_nodes.cluster.config import Config
from asyncspec_nodes.cluster.file import load
from asyncspec_nodes.cluster.security import CHECK_SECONDS, renewals
from asyncspec_protocol.ids import Rank


class PeerAddresses(Mapping[Rank, Address]):
    """By rank; the ranks stay those of the first reading."""

    def __init__(self, config: Config, file: Path | None) -> None:
        self._file = file
        # When the file that was read here was changed, in ns: it may be newer than ``config``.
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


async def renew(
    security: Security, check: Callable[[], None], log: Any, every: float = CHECK_SECONDS
) -> None:
    """``check`` the links whenever the files of the keys have changed, and log it, or why they do
    not fit together. Ends at once without keys."""
    async for refused in renewals(security, every):
        if refused:
            log.error("keys not renewed", why=refused)
        else:
            log.info("keys renewed")
            check()
