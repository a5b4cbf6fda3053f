"""A machine's way to the cluster that a token names: addresses, mDNS (DNS-SD) where they have
changed, and the connection."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import warnings
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp
import psutil

from asyncspec.actor.tcp import end_unacknowledged
from asyncspec.core.errors import ClusterError, UserError
from asyncspec_nodes.console.hosts import address, is_loopback
from asyncspec_nodes.plugins.join.messages import MAX_BYTES
from asyncspec_nodes.plugins.join.presence import GONE_SECONDS
from asyncspec_nodes.plugins.join.token import Token

if TYPE_CHECKING:
    from zeroconf.asyncio import AsyncZeroconf

SERVICE = "_asyncspec._tcp.local."
BROWSE_SECONDS = 5.0
OPEN_ATTEMPTS = 3


def own_addresses(*families: int) -> list[str]:
    """This machine's addresses of socket ``families`` (none: IPv4), those of the first family
    first, loopback ones last. IPv6 ones of a single link, which need its name, are left out."""
    families = families or (socket.AF_INET,)
    addresses = [
        (families.index(entry.family), entry.address)
        for name, entries in sorted(psutil.net_if_addrs().items())
        for entry in entries
        # Bridges of containers lead nowhere from another machine.
        if entry.family in families and not name.startswith(("docker", "br-", "veth"))
    ]
    hosts = [host for _, host in sorted(addresses, key=lambda item: item[0]) if "%" not in host]
    return sorted(dict.fromkeys(hosts), key=is_loopback) or ["127.0.0.1"]


def near(host: str) -> str:
    """Where this machine itself reaches what listens on ``host``."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def listening_addresses(sock: socket.socket) -> list[str]:
    """Where others reach what listens on ``sock``."""
    bound: str = sock.getsockname()[0]
    if near(bound) == bound:
        return [bound]
    if sock.family != socket.AF_INET6:
        return own_addresses()
    if sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY):
        return own_addresses(socket.AF_INET6)
    return own_addresses(socket.AF_INET, socket.AF_INET6)


def unmapped(host: str) -> str:
    """An address as a socket of both families sees it: an IPv4 one as such."""
    parsed = address(host)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return host if mapped is None else str(mapped)


def _open_mdns() -> AsyncZeroconf | None:
    """On all interfaces; None where there is no network for it. It fails where one goes away
    meanwhile, as bridges of containers do, and then leaves sockets for Python to close."""
    from zeroconf.asyncio import AsyncZeroconf

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for _ in range(OPEN_ATTEMPTS):
            with contextlib.suppress(OSError, RuntimeError):
                return AsyncZeroconf()
    return None


@asynccontextmanager
async def announced(cluster: str, hosts: Sequence[str], port: int) -> AsyncIterator[None]:
    """Inside, the cluster is announced; without an effect where there is no network to do so."""
    from zeroconf import Error, ServiceInfo

    numbers = [parsed.packed for host in hosts if (parsed := address(host)) is not None]
    info = ServiceInfo(
        SERVICE, f"{cluster}.{SERVICE}", addresses=numbers, port=port, server=f"{cluster}.local."
    )
    zeroconf = _open_mdns()
    if zeroconf is None:
        yield
        return
    try:
        with contextlib.suppress(OSError, RuntimeError, Error):
            await zeroconf.async_register_service(info)
        yield
    finally:
        try:
            with contextlib.suppress(OSError, RuntimeError, Error):
                await zeroconf.async_unregister_service(info)
        finally:
            await asyncio.shield(zeroconf.async_close())


async def browse(cluster: str, seconds: float = BROWSE_SECONDS) -> list[tuple[str, int]]:
    """Addresses that the cluster is announced under; empty where it is not."""
    zeroconf = _open_mdns()
    if zeroconf is None:
        return []
    try:
        name = f"{cluster}.{SERVICE}"
        info = await zeroconf.async_get_service_info(SERVICE, name, timeout=int(1000 * seconds))
        if info is None or info.port is None:
            return []
        return [(host, info.port) for host in info.parsed_addresses()]
    finally:
        await asyncio.shield(zeroconf.async_close())


REACH_SECONDS = 2.5
"""For a machine to accept a TCP connection: the second and the third attempt of a kernel are one
and three seconds after the first."""

CONNECT_SECONDS = 5.0
"""For TLS and the WebSocket with a machine that accepts."""


CLOSE_SECONDS = 1.0
"""For the cluster to close the connection, too."""


class NobodyThereError(ClusterError):
    """No cluster answers now."""


class Connector:
    """``address``: of the cluster, in place of the token's; None: these, then mDNS."""

    def __init__(self, token: Token, address: tuple[str, int] | None) -> None:
        self._token = token
        self._given = address
        # Where the cluster has been reached: its host, and the base of its addresses.
        self.host = self.base = ""
        # A search by mDNS under way, and what the last one has brought.
        self._browsing: asyncio.Task[list[tuple[str, int]]] | None = None
        self._announced: list[tuple[str, int]] = []

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {"Authorization": f"Bearer {self._token.bearer}"}

    @property
    def fingerprint(self) -> aiohttp.Fingerprint:
        """The only certificate that is accepted."""
        return aiohttp.Fingerprint(self._token.digest)

    async def connect(self, session: aiohttp.ClientSession) -> aiohttp.ClientWebSocketResponse:
        """Try every place once, which takes seconds at most; mDNS is asked meanwhile, for the next
        time. Raises ``NobodyThereError`` where no cluster answers yet, ``ClusterError``, and
        ``UserError`` where another one does."""
        places = self._places()
        try:
            channel = await self._first(session, places)
        except UserError:
            # Another machine may have got the address of the cluster's: mDNS knows that one.
            if self._browsing is None:
                raise
            await asyncio.wait((self._browsing,))
            places = self._places()
            channel = await self._first(session, places)
        if channel is not None:
            return channel
        tried = ", ".join(dict.fromkeys(f"{host}:{port}" for host, port in places))
        how = "" if self._given else ", nor one by mDNS; if it has moved, give --address HOST:PORT"
        raise NobodyThereError(f"no cluster answers at {tried}{how}")

    async def _first(
        self, session: aiohttp.ClientSession, places: Sequence[tuple[str, int]]
    ) -> aiohttp.ClientWebSocketResponse | None:
        """A connection to the first place that is of the cluster; None where nothing answers.
        Raises what those say that refuse, where no other is."""
        refused: UserError | None = None
        for host, port in await _accepting(places):
            try:
                channel = await self._dial(session, host, port)
            except UserError as error:
                refused = error
                continue
            if channel is not None:
                return channel
        if refused is not None:
            raise refused
        return None

    def _places(self) -> list[tuple[str, int]]:
        """Where the cluster may be, the likeliest first."""
        if self._given:
            return [self._given]
        if self._browsing is not None and self._browsing.done():
            if not self._browsing.cancelled() and self._browsing.exception() is None:
                self._announced = self._browsing.result()
            self._browsing = None
        if self._browsing is None:
            self._browsing = asyncio.create_task(browse(self._token.cluster))
        places = [(host, self._token.port) for host in self._token.hosts]
        return list(dict.fromkeys([*places, *self._announced]))

    async def close(self) -> None:
        """End what searches for the cluster."""
        if self._browsing is not None:
            self._browsing.cancel()
            await asyncio.gather(self._browsing, return_exceptions=True)
            self._browsing = None

    async def _dial(
        self, session: aiohttp.ClientSession, host: str, port: int
    ) -> aiohttp.ClientWebSocketResponse | None:
        """None where nothing answers."""
        self.host = host
        self.base = f"https://{f'[{host}]' if ':' in host else host}:{port}"
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                channel = await session.ws_connect(
                    f"{self.base}/join",
                    headers=self.headers,
                    ssl=self.fingerprint,
                    timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_SECONDS),
                    max_msg_size=MAX_BYTES,
                )
                end_unacknowledged(channel.get_extra_info("socket"), GONE_SECONDS)
                return channel
        except aiohttp.ServerFingerprintMismatch:
            raise UserError(
                f"the cluster at {host}:{port} has another certificate: the token is an old one; "
                "copy the line that asyncspec up prints now"
            ) from None
        except aiohttp.WSServerHandshakeError as error:
            if error.status == 401:
                raise UserError(
                    f"{host}:{port} refuses the token: it is another cluster's; copy the line "
                    "that asyncspec up prints"
                ) from None
            raise ClusterError(f"{host}:{port} is no asyncspec cluster ({error.status})") from None
        except (aiohttp.ClientError, OSError, TimeoutError, ssl.SSLError):
            return None


async def _accepting(places: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Those that accept TCP connections now, in the order of ``places``; all are asked at once, so
    that addresses which lead nowhere take no time from the others."""

    async def accepts(host: str, port: int) -> bool:
        try:
            async with asyncio.timeout(REACH_SECONDS):
                _, writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError):
            return False
        writer.transport.abort()
        return True

    answers = await asyncio.gather(*(accepts(*place) for place in places))
    return [place for place, answer in zip(places, answers, strict=True) if answer]


async def refuses(places: Sequence[tuple[str, int]]) -> bool:
    """Whether one of these refuses connections now: the process that listened there has ended."""
    for host, port in places:
        try:
            async with asyncio.timeout(REACH_SECONDS):
                _, writer = await asyncio.open_connection(host, port)
        except ConnectionRefusedError:
            return True
        except (OSError, TimeoutError):
            continue
        writer.transport.abort()
    return False
