"""Links that do not come up although every stage serves: a firewall, or a wrong address."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from asyncspec.core.errors import ClusterError
from asyncspec_nodes.join.members import Members
from asyncspec_protocol.clients import Status

PATIENCE_SECONDS = 10.0
"""A link is dialled again within some seconds."""

POLL_SECONDS = 2.0


async def report_missing_links(
    nodes: Callable[[], Awaitable[Sequence[Status]]],
    members: Members,
    say: Callable[[str], None],
    patience: float = PATIENCE_SECONDS,
    poll: float = POLL_SECONDS,
) -> None:
    """Until cancelled. ``nodes``: asks the draft node; ``say`` gets one line for each reason that
    lasts for ``patience`` seconds."""
    said, lasts, since = "", "", 0.0
    while True:
        missing = await _missing(nodes) if members.ready else ""
        if missing != lasts:
            lasts, since = missing, time.monotonic()
        if missing and missing != said and time.monotonic() - since >= patience:
            said = missing
            where = [node for node in members.config().node if f"stage {node.rank} is" in missing]
            dialled = "".join(f"; stage {n.rank} is dialled at {n.host}:{n.port}" for n in where)
            say(
                f"{missing}{dialled}: check that machine's firewall, and behind NAT its --advertise"
            )
        elif not missing:
            said = ""
        await asyncio.sleep(poll)


async def _missing(nodes: Callable[[], Awaitable[Sequence[Status]]]) -> str:
    """What the draft node misses; nothing while it is away itself."""
    try:
        return next((node.missing for node in await nodes() if node.role == "draft"), "")
    except ClusterError:
        return ""
