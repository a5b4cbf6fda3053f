"""The places of a service's connections: who makes room when they run out, and who stays too long.

Strangers, who have shown no API key, never keep a place from others: the one that has been quiet
for longest goes first, and a client's place goes only where no stranger's is left.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from asyncspec_nodes.http.limits import Limits

GRACE_SECONDS = 2.0
"""A connection that has just been made, or answered, is not closed for others of its address."""

SWEEP_SECONDS = 1.0

IPV6_PREFIX = 64
"""Bits of an address that one network's machines share: each of them has all addresses behind."""


class Occupant(Protocol):
    """A connection that holds a place."""

    @property
    def keyed(self) -> bool:
        """Whether a request over it had a key."""

    @property
    def address(self) -> str:
        """The peer's, as ``network`` writes it; empty while it is not known."""

    @property
    def at_work(self) -> bool:
        """Whether a request, which has come in full, is being handled."""

    @property
    def unread(self) -> bool:
        """Whether its reader has yet to take some of what was written."""

    def drop(self) -> None:
        """Close it now."""


class Places:
    """The connections of a service, those that have been quiet for longest first."""

    def __init__(
        self, limits: Limits, *, closed: bool = False, clock: Callable[[], float] | None = None
    ) -> None:
        """``closed``: whether the service asks for keys, so that strangers wait for nothing."""
        self._limits = limits
        self._closed = closed
        self._clock = clock or asyncio.get_running_loop().time
        # When each was made, sent a request or got its response.
        self._since: dict[Occupant, float] = {}

    def __len__(self) -> int:
        return len(self._since)

    def take(self, occupant: Occupant) -> bool:
        """A place for a new connection; False where all are taken by requests that run."""
        if len(self._since) >= self._limits.connections:
            strangers = (each for each in self._since if self._spare(each))
            clients = (each for each in self._since if each.keyed and not each.at_work)
            if not self._drop(next(strangers, None) or next(clients, None)):
                return False
        self._since[occupant] = self._clock()
        return True

    def touch(self, occupant: Occupant) -> None:
        """It has sent a request, or gets its response."""
        if self._since.pop(occupant, None) is not None:
            self._since[occupant] = self._clock()

    def leave(self, occupant: Occupant) -> None:
        self._since.pop(occupant, None)

    def bound(self, address: str) -> None:
        """After ``take``, with the peer's address known: close what strangers have too many of
        from there."""
        neighbours = [each for each in self._since if not each.keyed and each.address == address]
        if len(neighbours) > self._limits.strangers_per_address:
            self._drop(next(filter(self._spare, self._older(neighbours, GRACE_SECONDS)), None))

    def sweep(self) -> None:
        """Close strangers' connections that say nothing, where their next request needs a key."""
        if self._closed:
            for each in list(self._older(self._since, self._limits.stranger_seconds)):
                if self._spare(each) and not each.at_work and not each.unread:
                    self._drop(each)

    def _older(self, occupants: Iterable[Occupant], seconds: float) -> Iterator[Occupant]:
        """Those that have been quiet for so long."""
        until = self._clock() - seconds
        return (each for each in occupants if self._since[each] <= until)

    def _spare(self, occupant: Occupant) -> bool:
        """Whether it is a stranger's that may be closed for another's sake: where there are keys,
        at any time."""
        return not occupant.keyed and (self._closed or not occupant.at_work)

    def _drop(self, occupant: Occupant | None) -> bool:
        if occupant is None:
            return False
        self.leave(occupant)
        occupant.drop()
        return True


def network(address: str) -> str:
    """What counts as one address."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 6 and parsed.ipv4_mapped is None:
        return str(ipaddress.ip_network((parsed, IPV6_PREFIX), strict=False))
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)
