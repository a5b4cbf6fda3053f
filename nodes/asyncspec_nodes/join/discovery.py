"""Finding a cluster on the local network (mDNS, DNS-SD), where its address has changed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import psutil

from asyncspec_nodes.console.hosts import address, is_loopback

SERVICE = "_asyncspec._tcp.local."
BROWSE_SECONDS = 5.0


def own_addresses() -> list[str]:
    """This machine's IPv4 addresses, loopback ones last."""
    found = [
        entry.address
        for name, entries in sorted(psutil.net_if_addrs().items())
        for entry in entries
        # Bridges of containers lead nowhere from another machine.
        if entry.family == socket.AF_INET and not name.startswith(("docker", "br-", "veth"))
    ]
    return sorted(dict.fromkeys(found), key=is_loopback) or ["127.0.0.1"]


def near(host: str) -> str:
    """Where this machine itself reaches what listens on ``host``."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


@asynccontextmanager
async def announced(cluster: str, hosts: Sequence[str], port: int) -> AsyncIterator[None]:
    """Inside, the cluster is announced; without an effect where there is no network to do so."""
    from zeroconf import Error, ServiceInfo
    from zeroconf.asyncio import AsyncZeroconf

    numbers = [found.packed for host in hosts if (found := address(host)) is not None]
    info = ServiceInfo(
        SERVICE, f"{cluster}.{SERVICE}", addresses=numbers, port=port, server=f"{cluster}.local."
    )
    zeroconf = None
    try:
        zeroconf = AsyncZeroconf()
        await zeroconf.async_register_service(info)
    except (OSError, RuntimeError, Error):
        pass
    try:
        yield
    finally:
        if zeroconf is not None:
            with contextlib.suppress(OSError, RuntimeError, Error):
                await zeroconf.async_unregister_service(info)
            await zeroconf.async_close()


async def browse(cluster: str, seconds: float = BROWSE_SECONDS) -> list[tuple[str, int]]:
    """Addresses that the cluster is announced under; empty where it is not."""
    from zeroconf.asyncio import AsyncZeroconf

    try:
        zeroconf = AsyncZeroconf()
    except OSError:
        return []
    try:
        name = f"{cluster}.{SERVICE}"
        info = await zeroconf.async_get_service_info(SERVICE, name, timeout=int(1000 * seconds))
        if info is None or info.port is None:
            return []
        return [(host, info.port) for host in info.parsed_addresses()]
    finally:
        await asyncio.shield(zeroconf.async_close())
