"""What a running first stage plans while something else goes on."""

from __future__ import annotations

import asyncio

from asyncspec_nodes.client.client import Client
from asyncspec_protocol.messages import PlanStatus

WATCH_SECONDS = 0.25


class Watch:
    """Asks the first stage again and again what is planned, through one draft node."""

    def __init__(self, cluster: str, port: int) -> None:
        self._cluster, self._port = cluster, port
        self.reported: PlanStatus | None = None

    async def run(self, users: int) -> None:
        """Until it is cancelled; what was told last while all ``users`` took part stays."""
        client = await Client.connect("127.0.0.1", self._port, self._cluster)
        try:
            while True:
                reported = await client.plan_status()
                if reported.used and len(reported.sessions) == users:
                    self.reported = reported
                await asyncio.sleep(WATCH_SECONDS)
        finally:
            await client.close()
