"""Where machines join: the port, its certificate, and the connection of each member."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
import ssl
from collections.abc import Callable
from contextlib import AsyncExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from aiohttp import WSMsgType, web
from msgspec.structs import replace

from asyncspec.actor.tcp import end_unacknowledged, stop_listening
from asyncspec.core.errors import AsyncSpecError, ClusterError, UserError
from asyncspec_nodes.cluster.security import NODE
from asyncspec_nodes.http.limits import Limits
from asyncspec_nodes.http.metrics import Metrics
from asyncspec_nodes.http.server import Connections
from asyncspec_nodes.node import listen
from asyncspec_nodes.plugins.join import messages
from asyncspec_nodes.plugins.join.authority import (
    CA,
    CERTIFICATE,
    KEY,
    Authority,
    digest,
    write_private,
)
from asyncspec_nodes.plugins.join.connection import announced, listening_addresses, near, unmapped
from asyncspec_nodes.plugins.join.members import Member
from asyncspec_nodes.plugins.join.messages import (
    MAX_BYTES,
    PORTS,
    Admitted,
    FromMember,
    Offer,
    Orders,
    Refused,
    ToMember,
)
from asyncspec_nodes.plugins.join.parts import routes
from asyncspec_nodes.plugins.join.presence import GONE_SECONDS
from asyncspec_nodes.plugins.join.token import Token, TokenFile, new_cluster
from asyncspec_protocol.messages import PROTOCOL_VERSION

OFFER_SECONDS = 20.0
"""For a member's first message: it measures itself before."""

LIMITS = Limits(connections=512, request_seconds=10.0)
"""Bounds of connections, which strangers may open, too; members have one each, and some to fetch
the target."""


class Admission(Protocol):
    """Who decides about members."""

    def say(self, line: str, /) -> None:
        """A line for each event."""

    def admit(self, offer: Offer, seen: str, send: Callable[[ToMember], None]) -> Member:
        """One that may take part; ``seen``: the address of its connection."""

    def received(self, name: str, message: FromMember) -> bool:
        """A member's message; whether it stays."""

    def lost(self, member: Member) -> None:
        """A connection is gone."""


class JoinServer:
    """``async with``: its token. ``folder``: for its keys; ``target``: whose bytes members may
    fetch; ``address``: where it listens; ``advertise``: what the token says, an empty host: all of
    this machine's addresses, port 0: that of ``address``; ``stored``: by earlier runs."""

    def __init__(
        self,
        folder: Path,
        name: str,
        target: str,
        address: tuple[str, int],
        advertise: tuple[str, int],
        stored: TokenFile,
        admission: Admission,
    ) -> None:
        self._folder = folder
        self._target = target
        self._address = address
        self._advertise = advertise
        self._admission = admission
        self._stack = AsyncExitStack()
        self._file = stored
        self._keys = stored.read() or new_cluster(name)
        self._authority = Authority(self._keys.authority_key, self._keys.authority)
        self._run = secrets.token_hex(8)
        write_private(folder / KEY, self._keys.key)
        (folder / CA).write_text(self._keys.authority)
        (folder / CERTIFICATE).write_text(self._keys.certificate)

    @property
    def machines(self) -> int:
        """How many machines the cluster had in its last run, or as ``remember`` says."""
        return self._keys.machines

    def remember(self, machines: int) -> None:
        """The cluster has so many: the next run waits for them."""
        if machines != self._keys.machines:
            self._keys.machines = machines
            self._file.write(self._keys)

    def here(self, token: Token) -> Token:
        """For this machine itself, to which NAT need not lead back."""
        return replace(token, hosts=(near(self._address[0]),), port=self._keys.port)

    async def __aenter__(self) -> Token:
        try:
            return await self._listen()
        except BaseException:
            await self._stack.aclose()
            raise

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    async def _listen(self) -> Token:
        stack = self._stack
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(self._folder / CERTIFICATE, self._folder / KEY)
        app = web.Application()
        app.add_routes([web.get("/join", self._join)])
        app.add_routes(routes(self._target, self._allowed))
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        sock = self._bind()
        assert runner.server is not None
        connections = stack.enter_context(Connections(runner.server, Metrics(), LIMITS))
        server = connections.listen(sock, context, LIMITS.request_seconds)
        stack.push_async_callback(stop_listening, server)
        self._keys.port = sock.getsockname()[1]
        self._file.write(self._keys)
        host, port = self._advertise
        hosts = [host] if host else listening_addresses(sock)
        port = port or self._keys.port
        token = Token(tuple(hosts), port, digest(self._keys.certificate), self._keys.secret)
        await stack.enter_async_context(announced(token.cluster, hosts, port))
        return token

    def _bind(self) -> socket.socket:
        """The port of the earlier run, where none is asked for. Raises ``UserError``."""
        host, port = self._address
        earlier = self._keys.port
        if not port and earlier:
            try:
                return listen.bind(host, earlier, whose="--listen")
            except UserError as error:
                self._admission.say(f"machines find the cluster on a new port: {error}")
        return listen.bind(host, port, whose="--listen")

    def _allowed(self, request: web.Request) -> bool:
        # aiohttp has halves of surrogate pairs for bytes that are no text.
        authorization = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        return hmac.compare_digest(authorization, f"Bearer {self._keys.secret.hex()}".encode())

    async def _join(self, request: web.Request) -> web.StreamResponse:
        """A member's connection, to its end."""
        if not self._allowed(request):
            refused = web.Response(status=401)
            refused.force_close()
            return refused
        channel = web.WebSocketResponse(max_msg_size=MAX_BYTES)
        await channel.prepare(request)
        end_unacknowledged(channel.get_extra_info("socket"), GONE_SECONDS)
        try:
            async with asyncio.timeout(OFFER_SECONDS):
                offer = messages.decode(await channel.receive_str(), Offer)
            check_offer(offer)
            certificate = self._authority.issue(offer.request)  # for no rank yet
        except (AsyncSpecError, TimeoutError, TypeError) as error:
            said = isinstance(error, AsyncSpecError)
            text = str(error) if said else "it was lost before it said what it is"
            self._admission.say(f"a machine is refused: {text}")
            with contextlib.suppress(OSError, RuntimeError):  # it may be gone
                await channel.send_str(messages.encode(Refused(text)))
                await channel.close()
            return channel
        queue: asyncio.Queue[ToMember] = asyncio.Queue()
        queue.put_nowait(Admitted(self._authority.pem, certificate, self._run))
        sending = asyncio.create_task(_send(channel, queue))

        def send(message: ToMember) -> None:
            if isinstance(message, Orders):
                roles = [f"{NODE}:{rank}" for rank in (*message.ranks, *message.standby)]
                issued = self._authority.issue(offer.request, *roles)
                message = replace(message, certificate=issued)
            queue.put_nowait(message)

        member = self._admission.admit(offer, unmapped(request.remote or ""), send)
        try:
            async for raw in channel:
                if raw.type is not WSMsgType.TEXT:
                    break
                message: FromMember = messages.decode(raw.data, FromMember)  # type: ignore[arg-type]
                if not self._admission.received(offer.member, message):
                    break
        except ClusterError as error:
            self._admission.say(f"{offer.name}: {error}")
        finally:
            sending.cancel()
            self._admission.lost(member)
        return channel


def check_offer(offer: Offer) -> None:
    """Raises ``UserError`` for a machine that cannot take part."""
    ours = version("asyncspec")
    if (offer.version, offer.protocol) != (ours, PROTOCOL_VERSION):
        raise UserError(
            f"{offer.name} has asyncspec {offer.version} and the cluster {ours}; install the "
            "same version on both"
        )
    if len(offer.ports) != PORTS:
        raise UserError(f"{offer.name} has {len(offer.ports)} ports for stages; it needs {PORTS}")


async def _send(channel: web.WebSocketResponse, queue: asyncio.Queue[ToMember]) -> None:
    with contextlib.suppress(OSError, RuntimeError):  # it is gone
        while True:
            await channel.send_str(messages.encode(await queue.get()))
