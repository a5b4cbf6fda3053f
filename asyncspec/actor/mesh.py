"""The links of a node: listening, dialling, handshakes, and dialling again.

Draft nodes dial every stage (and the token source, where that is a node of its own), stage k dials
stage k+1; clients dial draft nodes; all others are refused. Each node listens on one port. Stages
and the source take any draft node that shakes hands, listed or not. A second link of a rank
replaces the first only when that one is dead.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from asyncspec.actor import tcp
from asyncspec.actor.link import CLOSED, Certificate, Link, LinkOptions
from asyncspec.core.machine import TraceHook
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.framing import Frame
from asyncspec_protocol.ids import Rank, draft_number, is_draft
from asyncspec_protocol.links import HANDSHAKE, answer
from asyncspec_protocol.messages import Fault, Hello, Welcome

if TYPE_CHECKING:  # it imports numpy, which takes longer than most commands
    from asyncspec.actor.routing import Incoming

Address = tuple[str, int]

_NOT_YET_VALID, _EXPIRED = 9, 10
"""OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""

MOVED_SECONDS = 0.1
"""Between two looks whether a peer that is dialled has another address."""

REPLACED_SECONDS = 2.0
"""Four heartbeats: a link that is silent for so long gives way to another one of its rank, as a
stopped process's does to that of the machine that has got its layers."""

MAX_REFUSALS = 64
"""Refusals that are remembered as reported; a stranger may cause any number."""


REFUSED_CERTIFICATE = (
    "it may have refused this machine's certificate, as of another authority or, by its clock, of "
    "another time"
)
"""With TLS 1.3 a peer checks our certificate when the connection is up already, and then closes
it."""


def tls_problem(error: ssl.SSLError) -> str:
    """Why there is no TLS with a peer. Dates are judged by a clock that may be the wrong one."""
    if not isinstance(error, ssl.SSLCertVerificationError):
        return f"no TLS with it: {error}"
    dated = error.verify_code in (_NOT_YET_VALID, _EXPIRED)
    clock = f"; this machine's clock says {datetime.now(UTC):%Y-%m-%d}" if dated else ""
    return f"its certificate is refused: {error.verify_message}{clock}"


def _reporting(report: Callable[[str], None]) -> type[ssl.SSLObject]:
    """For connections that report why a certificate is refused; event loops do not."""

    class Reporting(ssl.SSLObject):
        def do_handshake(self) -> None:
            try:
                super().do_handshake()
            except ssl.SSLCertVerificationError as error:
                report(tls_problem(error))
                raise

    return Reporting


class Security:
    """TLS contexts of the two sides (None is plain TCP), and what certificates allow. This one is
    of a cluster without keys."""

    server: ssl.SSLContext | None = None
    client: ssl.SSLContext | None = None

    def problem(self, certificate: Certificate | None, peer: Hello | Welcome) -> str:
        """Why the holder of a certificate is not what it says it is; empty where it is."""
        return ""

    def operator(self, certificate: Certificate | None) -> bool:
        """Whether the holder may record traces."""
        return True


PLAIN = Security()
"""Without TLS."""


def dialled(me: Hello, peers: Collection[Rank]) -> tuple[Rank, ...]:
    """The ranks this node dials, of those there are."""
    if me.role == "draft":
        return tuple(sorted(rank for rank in peers if not is_draft(rank)))
    return (Rank(me.rank + 1),) if me.role == "verify" and me.rank < me.stages else ()


def is_dialled_by(me: Hello, rank: Rank) -> bool:
    """Whether the node of another rank dials this one, listed or not."""
    if is_draft(rank):
        return not is_draft(me.rank)
    return rank + 1 == me.rank <= me.stages


class Mesh:
    """The links of one node."""

    def __init__(
        self,
        me: Hello,
        peers: Mapping[Rank, Address],
        callbacks: Incoming,
        options: LinkOptions,
        security: Security,
    ) -> None:
        self.links: dict[Rank, Link] = {}
        # Why the latest handshake with a peer that this node dials has failed.
        self.refusals: dict[Rank, str] = {}
        # The reported refusals, in both directions.
        self._reported: set[tuple[Rank, str]] = set()
        self.rank = me.rank
        self._me = me
        self._peers = peers
        self._callbacks = callbacks
        self._options = options
        self._security = security
        self._hook: TraceHook | None = None
        # Links of nodes and clients, also before their handshakes.
        self._all: set[Link] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | tcp.TlsListener[Link] | None = None

    async def start(self, sock: socket.socket) -> None:
        """Listen on ``sock`` and dial."""
        loop = asyncio.get_running_loop()
        tls = self._security.server
        if tls is None:
            self._server = await loop.create_server(
                lambda: self._accept(full=self._full), sock=sock
            )
        else:
            tls.sslobject_class = _reporting(partial(self._report_refusal, Rank(-1)))
            self._server = tcp.TlsListener(
                *(sock, tls, lambda: None if self._full else self._accept()),
                lambda link: link.abort(CLOSED),
                # A handshake that is not completed ends when ``Hello`` would be late.
                handshake_seconds=self._options.hello_seconds,
            )
        self._tasks = [
            loop.create_task(self._dial(rank)) for rank in dialled(self._me, self._peers)
        ]

    async def close(self, reason: str) -> None:
        """Close every link and stop listening and dialling."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await tcp.stop_listening(self._server)
        waiting = [link.gone for link in self._all]
        for link in list(self._all):
            link.close(reason)
        if waiting:
            await asyncio.wait(waiting, timeout=1.0)
        for link in list(self._all):
            link.abort(reason)

    def record(self, hook: TraceHook | None) -> None:
        """Report events of links to nodes to ``hook`` from now on; None: to none."""
        self._hook = hook
        for link in self.links.values():
            link.hook = hook

    def check_certificates(self) -> None:
        """End the links of peers whose certificates do not allow them any more."""
        for link in list(self._all):
            if link.peer is not None:
                problem = self._security.problem(link.certificate, link.peer)
                if problem:
                    link.refuse(Fault(HANDSHAKE, problem))

    @property
    def _full(self) -> bool:
        """Whether as many connections are before or in their handshakes as may be."""
        return sum(link.peer is None for link in self._all) >= self._options.most_strangers

    def _accept(self, *, full: bool = False) -> Link:
        """A new connection's link, which ends at once if the node is ``full``."""
        link = Link(self._options, self._first_frame, self._gone)
        self._all.add(link)
        link.expect(0.0 if full else self._options.hello_seconds, "hello")
        return link

    def _first_frame(self, link: Link, frame: Frame) -> None:
        if link.peer is not None:
            self._callbacks.frame(link, frame)
            return
        hello = frame.message
        if not isinstance(hello, Hello):
            raise RemoteProtocolError(f"{type(hello).__name__} before Hello")
        problem = self._security.problem(link.certificate, hello)
        reply = Fault(HANDSHAKE, problem) if problem else answer(self._me, hello)
        if isinstance(reply, Welcome) and hello.role != "client":
            reply = self._place_for(hello.rank) or reply
        elif isinstance(reply, Welcome) and self._me.role != "draft":
            reply = Fault(HANDSHAKE, "clients are served by rank 0: dial the draft node")
        elif isinstance(reply, Welcome) and self._clients >= self._options.most_clients:
            reply = Fault("busy", f"{self._clients} clients are connected already; try again later")
        if isinstance(reply, Fault):
            link.refuse(reply)
            if hello.role != "client":  # clients report it to their users
                self._report_refusal(hello.rank, reply.text)
            return
        link.send(reply)
        self._join(link, hello)

    @property
    def _clients(self) -> int:
        return sum(link.peer is not None and link.peer.role == "client" for link in self._all)

    def _report_refusal(self, rank: Rank, reason: str) -> None:
        if (rank, reason) in self._reported:
            return
        if len(self._reported) >= MAX_REFUSALS:
            self._reported.clear()
        self._reported.add((rank, reason))
        self._callbacks.refused(rank, reason)

    def _place_for(self, rank: Rank) -> Fault | None:
        """Why a rank that dials here is refused: it is linked already, or should not dial."""
        if rank in self.links and is_draft(rank):
            return Fault(
                HANDSHAKE,
                f"draft node {draft_number(rank)} is connected already: give each draft node a "
                "number of its own (--rank)",
            )
        if rank in self.links:
            if self.links[rank].silent_seconds >= REPLACED_SECONDS:
                # The other side dials again at once.
                self.links[rank].abort("silent, and another node has its rank")
            return Fault(HANDSHAKE, f"rank {rank} is connected already: give each rank once")
        if rank in dialled(self._me, self._peers):
            return Fault(HANDSHAKE, f"rank {self._me.rank} dials rank {rank} itself")
        if not is_dialled_by(self._me, rank):
            # Nothing would be sent on such a link, and its end would look like a lost neighbour's.
            text = f"rank {rank} does not dial rank {self._me.rank}: correct the address"
            return Fault(HANDSHAKE, text)
        return None

    async def _dial(self, rank: Rank) -> None:
        """Keep a link to ``rank`` up for ever."""
        shortest, longest = self._options.redial_seconds
        pause = shortest
        while True:
            address = self._peers[rank]
            reason = await self._linked(rank, address)
            self.refusals.pop(rank, None)
            if reason is None:
                pause = shortest
            elif reason:
                self.refusals[rank] = reason
                self._report_refusal(rank, reason)
            try:
                async with asyncio.timeout(pause):
                    await self._moved(rank, address)
                pause = shortest
            except TimeoutError:
                pause = min(2 * pause, longest)

    async def _moved(self, rank: Rank, address: Address) -> None:
        """Wait until a peer has another address: its machine may be gone, and a new one there."""
        while True:
            if self._peers[rank] != address:
                return
            await asyncio.sleep(MOVED_SECONDS)

    async def _linked(self, rank: Rank, address: Address) -> str | None:
        """Dial once and wait for the link's end. None if there was one, else why; "": no answer,
        or another address by now."""
        try:
            link = await self._connected(rank, address)
        except ssl.SSLError as error:
            return tls_problem(error)
        except OSError:
            return ""
        self._all.add(link)
        link.expect(self._options.welcome_seconds, "welcome")
        link.send(self._me)
        replacing = asyncio.get_running_loop().create_task(self._replace(rank, address, link))
        try:
            reason = await link.gone
        finally:
            replacing.cancel()
        self._all.discard(link)  # it may have ended before it was added
        if link.peer is not None:
            return None
        if reason != CLOSED:
            return reason
        if self._security.client is None:
            return f"{reason}: it may want TLS, as in a cluster file with [security]"
        return f"{reason}: {REFUSED_CERTIFICATE}"

    async def _replace(self, rank: Rank, address: Address, link: Link) -> None:
        """End a silent link to a peer that has moved."""
        while True:
            await asyncio.sleep(REPLACED_SECONDS / 2)
            if link.silent_seconds >= REPLACED_SECONDS and self._peers[rank] != address:
                link.abort("silent, and its rank has another address now")
                return

    async def _connected(self, rank: Rank, address: Address) -> Link:
        """Raises ``OSError``, also where it takes too long or the peer has moved meanwhile."""
        loop = asyncio.get_running_loop()
        connecting = loop.create_task(
            loop.create_connection(
                lambda: Link(self._options, partial(self._welcomed, rank), self._gone),
                *address,
                ssl=self._security.client,
            )
        )
        tasks = connecting, loop.create_task(self._moved(rank, address))
        limit = self._options.dial_seconds
        try:
            await asyncio.wait(tasks, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                raise TimeoutError
            return connecting.result()[1]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _welcomed(self, rank: Rank, link: Link, frame: Frame) -> None:
        """The answer to our hello, or a later frame."""
        if link.peer is not None:
            self._callbacks.frame(link, frame)
            return
        message = frame.message
        if isinstance(message, Fault):
            link.close(message.text)
            return
        if not isinstance(message, Welcome) or message.rank != rank:
            raise RemoteProtocolError(f"rank {rank} was dialled, another node has answered")
        problem = self._security.problem(link.certificate, message)
        verdict = Fault(HANDSHAKE, problem) if problem else answer(self._me, message)
        if isinstance(verdict, Fault):
            link.refuse(verdict)
            return
        self._join(link, message)

    def _join(self, link: Link, peer: Hello | Welcome) -> None:
        link.accepted(peer)
        link.operator = self._security.operator(link.certificate)
        if peer.role != "client":
            self.refusals.pop(peer.rank, None)
            self._reported = {known for known in self._reported if known[0] != peer.rank}
            self.links[peer.rank] = link
            link.hook = self._hook
        self._callbacks.joined(link)

    def _gone(self, link: Link, reason: str) -> None:
        self._all.discard(link)
        if link.peer is None:
            return
        if self.links.get(link.rank) is link:
            del self.links[link.rank]
        self._callbacks.lost(link, reason)
