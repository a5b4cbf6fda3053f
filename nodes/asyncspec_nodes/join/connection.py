"""A machine's way to the cluster that a token names."""

from __future__ import annotations

import asyncio
import ssl

import aiohttp

from asyncspec.core.errors import ClusterError, UserError
from asyncspec_nodes.join.discovery import browse
from asyncspec_nodes.join.messages import HEARTBEAT_SECONDS, MAX_BYTES
from asyncspec_nodes.join.token import Token

CONNECT_SECONDS = 5.0


class NobodyThereError(UserError):
    """No cluster answers."""


class Connector:
    """``address``: of the cluster, in place of the token's; None: these, then mDNS."""

    def __init__(self, token: Token, address: tuple[str, int] | None) -> None:
        self._token = token
        self._given = address
        # Where the cluster has been reached: its host, and the base of its addresses.
        self.host = self.base = ""

    @property
    def headers(self) -> dict[str, str]:
        """Of every request."""
        return {"Authorization": f"Bearer {self._token.bearer}"}

    @property
    def fingerprint(self) -> aiohttp.Fingerprint:
        """The only certificate that is accepted."""
        return aiohttp.Fingerprint(self._token.digest)

    async def connect(self, session: aiohttp.ClientSession) -> aiohttp.ClientWebSocketResponse:
        """Raises ``UserError`` and ``ClusterError``."""
        token, given = self._token, self._given
        places = [given] if given else [(host, token.port) for host in token.hosts]
        looked = bool(given)
        tried: list[str] = []
        while True:
            for host, port in places:
                tried.append(f"{host}:{port}")
                channel = await self._dial(session, host, port)
                if channel is not None:
                    return channel
            if looked:
                break
            looked, places = True, await browse(token.cluster)
        how = "" if given else ", and none announces itself by mDNS; give --address HOST:PORT"
        raise NobodyThereError(f"no cluster answers at {', '.join(dict.fromkeys(tried))}{how}")

    async def _dial(
        self, session: aiohttp.ClientSession, host: str, port: int
    ) -> aiohttp.ClientWebSocketResponse | None:
        """None where nothing answers."""
        self.host = host
        self.base = f"https://{f'[{host}]' if ':' in host else host}:{port}"
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                return await session.ws_connect(
                    f"{self.base}/join",
                    headers=self.headers,
                    ssl=self.fingerprint,
                    heartbeat=HEARTBEAT_SECONDS,
                    max_msg_size=MAX_BYTES,
                )
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
