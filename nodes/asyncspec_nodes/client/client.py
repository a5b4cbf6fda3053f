"""A client of a draft node: one link, any number of requests on it.

Every wait is bounded: heartbeats detect a dead node, connecting has its own time-out.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncGenerator, Callable
from itertools import count
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.actor.inbox import Event, Inbox, StatusAnswers
from asyncspec.actor.link import CLOSED, Link, LinkOptions
from asyncspec.actor.mesh import PLAIN, REFUSED_CERTIFICATE, Security, tls_problem
from asyncspec.core.errors import ClusterError, UserError
from asyncspec.core.tensors import WireTensor
from asyncspec_nodes.cluster.config import SecurityTable
from asyncspec_nodes.cluster.security import contexts
from asyncspec_nodes.console.hosts import is_host
from asyncspec_protocol.errors import LocalProtocolError, RemoteProtocolError
from asyncspec_protocol.framing import Frame
from asyncspec_protocol.ids import is_draft
from asyncspec_protocol.limits import MAX_HEADER_BYTES
from asyncspec_protocol.links import HANDSHAKE, client_hello
from asyncspec_protocol.messages import (
    Cancel,
    Collect,
    Drain,
    Drained,
    Events,
    Fault,
    Finished,
    Hello,
    Inspect,
    Output,
    PlanStatus,
    PlanStatusRequest,
    Status,
    Submit,
    Welcome,
)

CONNECT_SECONDS = 10.0
CLOSE_SECONDS = 1.0
PROBE_SECONDS = 2.0
PLAN_STATUS_SECONDS = 10.0
"""Longer than a draft node waits for the first stage."""

Sink = Callable[[Events, memoryview | None], None]
FeatureSink = Callable[[int, WireTensor], None]
"""Takes features of the positions from a start on; the bytes are the link's."""


class LinkLostError(ClusterError):
    """The draft node is gone while it worked on a request, which may go on when it is back."""


class ClusterAddress(Struct, frozen=True):
    """The draft node of a running cluster."""

    host: str
    port: int
    # The required cluster name; empty: any.
    cluster: str
    security: SecurityTable | None = None

    async def connect(self) -> Client:
        security = contexts(self.security)
        return await Client.connect(self.host, self.port, self.cluster, security=security)


class Client:
    """Make it with ``connect``; ``async with`` closes it."""

    def __init__(self, where: str, options: LinkOptions, security: Security) -> None:
        self.security = security
        self._where = where
        self._welcome: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self._answers: dict[int, Inbox] = {}
        self._features: dict[int, FeatureSink] = {}
        self._collections: dict[int, Sink] = {}
        self._status_queries: dict[int, StatusAnswers] = {}
        # Queries with one answer.
        self._queries: dict[int, asyncio.Future[Any]] = {}
        self._numbers = count()
        self._connected = False
        self._tls = security.client is not None
        # The node refused the handshake: a user's mistake.
        self._refused = False
        self.link = Link(options, self._frame, self._gone)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    @property
    def welcome(self) -> Welcome | Hello:
        """The draft node's description of the cluster."""
        assert self.link.peer is not None
        return self.link.peer

    @classmethod
    async def connect(
        cls,
        host: str,
        port: int,
        cluster: str,
        *,
        security: Security = PLAIN,
        options: LinkOptions | None = None,
    ) -> Client:
        """Link to a draft node. ``cluster``: the required cluster name; empty: any. Raises
        ``ClusterError`` that names the node, ``UserError`` for what the user can change."""
        where, tls = f"{host}:{port}", security.client
        if not is_host(host):
            raise UserError(f"{host} is no host name and no address; correct the address")
        client = cls(where, options or LinkOptions(), security)
        loop, link = asyncio.get_running_loop(), client.link
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await loop.create_connection(lambda: link, host, port, ssl=tls)
                client._connected = True
                link.send(client_hello(cluster))
                welcome = await client._welcome
                if problem := client._problem(welcome):
                    raise UserError(f"the node at {where} is refused: {problem}")
                link.accepted(welcome)
        except BaseException as error:
            await client.close()
            if isinstance(error, TimeoutError):
                raise ClusterError(
                    f"{where} does not answer within {CONNECT_SECONDS:g} s: if it is a draft node "
                    "it may still be loading its model; try again then, or correct the address"
                ) from None
            if isinstance(error, OSError):
                why = _reason(error)
                raise ClusterError(f"cannot connect to the draft node at {where}: {why}") from None
            # A node with [security] closes plain connections without a message.
            mute = isinstance(error, ClusterError) and not link.bytes_received
            if mute and tls is None and await _wants_tls(host, port):
                raise UserError(
                    f"the draft node at {where} wants TLS: its cluster has keys ([security]); give "
                    "--config FILE, the cluster file, with a certificate and key of this machine "
                    "beside it"
                ) from None
            raise
        return client

    async def ask(
        self, submit: Submit, features: FeatureSink | None = None
    ) -> AsyncGenerator[Event, None]:
        """The answer's events; the last is ``Finished``. ``submit.request`` is assigned here.
        ``features`` is called with what ``submit.features`` requests. Closing early cancels the
        request. A request too large for a message is refused as by the draft node. Raises
        ``ClusterError``."""
        number = self._number()
        try:
            self.link.send(replace(submit, request=number))
        except LocalProtocolError:  # nothing was sent
            text = (
                f"the prompt takes more than the {MAX_HEADER_BYTES} bytes of a message; shorten it"
            )
            yield Finished(number, "error", text, {}, "prompt_too_long")
            return
        inbox = self._answers[number] = Inbox(lambda: self.link.send(Cancel(number)))
        if features is not None:
            self._features[number] = features
        try:
            async for event in inbox.read():
                yield event
        finally:
            del self._answers[number]
            self._features.pop(number, None)
            inbox.close()

    def cancel(self) -> None:
        """Cancel all requests; their last events say how far they came."""
        for number in self._answers:
            self.link.send(Cancel(number))

    async def nodes(self) -> tuple[Status, ...]:
        """Status of every reachable node, by rank. Raises ``ClusterError``."""
        number = self._number()
        statuses = self._status_queries[number] = StatusAnswers()
        self.link.send(Inspect(number))
        try:
            return await statuses.complete
        finally:
            del self._status_queries[number]

    async def plan_status(self) -> PlanStatus:
        """The first stage's plan status. Raises ``ClusterError`` that names the silent node."""
        try:
            async with asyncio.timeout(PLAN_STATUS_SECONDS):
                status: PlanStatus = await self._query(PlanStatusRequest)
        except TimeoutError:
            raise ClusterError(
                f"the draft node at {self._where} does not say within {PLAN_STATUS_SECONDS:g} s "
                "what is planned"
            ) from None
        if status.missing:
            raise ClusterError(status.missing)
        return status

    async def drain(self, *, on: bool) -> None:
        """Let the draft node take no new requests, and wait until none is left; or let it take some
        again. Raises ``ClusterError``."""
        drained: Drained = await self._query(lambda number: Drain(number, on))
        if drained.reason:
            raise ClusterError(f"the draft node at {self._where} is not drained: {drained.reason}")

    async def _query(self, message: Callable[[int], PlanStatusRequest | Drain]) -> Any:
        """The answer to a ``message`` of a number. Raises ``ClusterError``."""
        number = self._number()
        answer = self._queries[number] = asyncio.get_running_loop().create_future()
        self.link.send(message(number))
        try:
            return await answer
        finally:
            del self._queries[number]

    def collect(self, last: float, sink: Sink, *, tokens: bool) -> int:
        """Collect the cluster's trace from ``last`` seconds ago (-1: everything) until
        ``stop_collecting``, by calling ``sink``; with the ``tokens`` of all users or without.
        Returns the collection's number."""
        number = next(self._numbers)
        self._collections[number] = sink
        self.link.send(Collect(number, last, follow=True, tokens=tokens))
        return number

    def stop_collecting(self, number: int) -> None:
        """Request the end; the last part is marked ``done``."""
        self.link.send(Collect(number, 0.0, follow=False, stop=True))

    def drop_collection(self, number: int) -> None:
        """Ignore later parts."""
        del self._collections[number]

    def check_certificate(self) -> None:
        """End the link where the draft node's certificate does not allow it any more."""
        if self.link.peer is not None and (problem := self._problem(self.link.peer)):
            self.link.abort(problem)

    def _problem(self, peer: Welcome | Hello) -> str:
        """Why the peer is not taken for a draft node; empty where it is."""
        # Before its certificate is checked, which fits what the peer says it is: a client's may be
        # of any user, who must not receive the others' requests.
        if peer.role != "draft" or not is_draft(peer.rank):
            return f"it calls itself a {peer.role}, not a draft node; correct the address"
        return self.security.problem(self.link.certificate, peer)

    async def close(self) -> None:
        """Close the link; the node cancels what is still running on it."""
        self.link.close("done")
        if self._connected:
            await asyncio.wait((self.link.gone,), timeout=CLOSE_SECONDS)
            self.link.abort("done")

    def _frame(self, link: Link, frame: Frame) -> None:
        match frame.message:
            case Welcome() as welcome if not self._welcome.done():
                self._welcome.set_result(welcome)
            case Fault(code, text):
                self._refused = code == HANDSHAKE
                link.close(text)
            case Output(request) as output if frame.tensor is not None:
                if request in self._features and frame.data is not None:
                    spec = frame.tensor
                    tensor = WireTensor(spec.dtype, spec.shape, frame.data)
                    self._features[request](output.features_start, tensor)
            case Output(request) | Finished(request) as event:
                if request in self._answers:
                    self._answers[request].put(event)
            case Status(query) as status:
                if query in self._status_queries:
                    self._status_queries[query].send(status)
            case PlanStatus(query) | Drained(query) as reply:
                answer = self._queries.get(query)
                if answer is not None and not answer.done():
                    answer.set_result(reply)
            case Events(collection) as events:
                if collection in self._collections:
                    self._collections[collection](events, frame.data)
            case message:
                raise RemoteProtocolError(f"unexpected {type(message).__name__} to a client")

    def _number(self) -> int:
        """A new request number. Raises ``ClusterError`` where the link is gone."""
        if self.link.gone.done():
            raise self._lost(self.link.gone.result())
        return next(self._numbers)

    def _lost(self, reason: str) -> LinkLostError:
        return LinkLostError(f"the draft node at {self._where} is gone: {reason}")

    def _gone(self, link: Link, reason: str) -> None:
        if not self._welcome.done():
            kind = UserError if self._refused else ClusterError
            if reason == CLOSED and self._tls:
                reason = f"{reason}: {REFUSED_CERTIFICATE}"
            self._welcome.set_exception(
                kind(f"the node at {self._where} refuses this client: {reason}")
            )
            self._welcome.exception()  # retrieved, in case nothing awaits it
        for inbox in self._answers.values():
            inbox.put(self._lost(reason))
        for statuses in self._status_queries.values():
            statuses.fail(self._lost(reason))
        for answer in self._queries.values():
            if not answer.done():
                answer.set_exception(self._lost(reason))


async def _wants_tls(host: str, port: int) -> bool:
    """Whether the peer completes a TLS handshake. No data is sent, so its certificate is not
    checked; with TLS 1.3 the peer asks for ours only afterwards."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            transport, _ = await asyncio.get_running_loop().create_connection(
                asyncio.Protocol, host, port, ssl=context
            )
    except OSError:  # also where it took too long
        return False
    transport.abort()
    return True


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return tls_problem(error)
    if isinstance(error, socket.gaierror):  # its numbers are not the system's
        return f"its name cannot be resolved: {error.strerror}"
    return os.strerror(error.errno) if error.errno else str(error)
