"""Where a node's messages go: in, to its machine or the services of its process; out, to its links.

Law of this module: messages of one step are held until the whole step is performed, then written.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

from asyncspec.actor.link import Link
from asyncspec.backend import row_compression
from asyncspec.backend.base import Tensors, WireTensor
from asyncspec.core.jobs import TensorRows
from asyncspec.core.machine import Emit, Finish, Input, LinkDown, LinkUp, Received
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.framing import Frame
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import Close, Fault, Message

NODES = ("draft", "verify", "source")

Senders = Mapping[type[Any], Collection[str]]
"""The roles that may send each type of message."""


class LinkService:
    """Handles messages that the machine does not: requests for text, a trace, a status."""

    # The messages it handles.
    senders: ClassVar[Senders] = {}

    def joined(self, link: Link) -> None:
        """A link to a node or a client is up."""

    def lost(self, link: Link, reason: str) -> None:
        """A link to a node or a client is down."""

    def received(self, link: Link, message: Any, data: memoryview | None) -> None:
        """One of ``senders``, with the bytes of its tensor. May raise ``RemoteProtocolError``."""


class Host(LinkService):
    """The process around a runtime."""

    def emit(self, effect: Emit) -> None:
        """Committed tokens for a user."""

    def finish(self, effect: Finish) -> None:
        """The end of a request."""

    def refused(self, rank: Rank, reason: str) -> None:
        """A handshake with a node has failed, whichever side dialled and whichever refused. Called
        once for each reason until the node joins. ``rank`` -1: whose certificate was refused here
        before it had said who it is."""


class Incoming:
    """Feeds the machine with the mesh's events; services handle messages of other types."""

    def __init__(self, feed: Callable[[Input], None], tensors: Tensors | None, host: Host) -> None:
        self.refused = host.refused
        self._feed = feed
        self._tensors = tensors
        self._services: list[LinkService] = []
        self._handlers: dict[type[Any], LinkService] = {}
        self.add(host)

    def add(self, service: LinkService) -> None:
        """``service`` handles its messages from now on."""
        self._services.append(service)
        self._handlers.update(dict.fromkeys(service.senders, service))

    def joined(self, link: Link) -> None:
        """A handshake is done, with a node or a client."""
        for service in self._services:
            service.joined(link)
        if link.rank >= 0:
            self._feed(LinkUp(link.rank))

    def lost(self, link: Link, reason: str) -> None:
        """A link that had joined is gone."""
        for service in self._services:
            service.lost(link, reason)
        if link.rank >= 0:
            self._feed(LinkDown(link.rank, reason, link.silent_seconds))

    def frame(self, link: Link, frame: Frame) -> None:
        """A message of a link that has joined. Raises ``RemoteProtocolError``."""
        message, kind, peer = frame.message, type(frame.message), link.peer
        assert peer is not None
        if isinstance(message, Fault):
            link.close(message.text)
            return
        service = self._handlers.get(kind)
        if peer.role not in (NODES if service is None else service.senders[kind]):
            raise RemoteProtocolError(f"role {peer.role!r} may not send {kind.__name__} here")
        if service is not None:
            service.received(link, message, frame.data)
            return
        seconds = 0.0 if frame.data is None else link.byte_seconds * frame.data.nbytes
        self._feed(Received(link.rank, message, self._unpack(frame), seconds))

    def _unpack(self, frame: Frame) -> object | None:
        if frame.tensor is None or frame.data is None:
            return None
        if self._tensors is None:
            raise RemoteProtocolError("this node takes no tensors")
        wire = WireTensor(frame.tensor.dtype, frame.tensor.shape, frame.data)
        try:
            return self._tensors.unpack(row_compression.unpack(wire))
        except ValueError as error:
            raise RemoteProtocolError(str(error)) from error


class Outgoing:
    """Sends to the links that are up; ``tensors`` makes bytes of rows."""

    def __init__(self, links: Mapping[Rank, Link], tensors: Tensors | None) -> None:
        # Bytes written for each session that is open.
        self.session_bytes: Counter[int] = Counter()
        self._links = links
        self._tensors = tensors
        # Links that hold messages; those with a tensor first.
        self._holding: deque[Link] = deque()

    def send(self, to: Rank, message: Message, rows: TensorRows | None = None) -> int:
        """Hand a message to a link, for ``flush``. Returns its bytes: 0 if the link is down."""
        link = self._links.get(to)
        if link is None:
            return 0
        tensor = None
        if rows is not None:
            assert self._tensors is not None
            tensor = self._tensors.pack(rows)
            if link.packs:
                tensor = row_compression.pack(tensor)
        # Rows give another device work, so they precede control messages.
        (self._holding.append if tensor is None else self._holding.appendleft)(link)
        size = link.hold(message, tensor)
        session = getattr(message, "session", None)
        # A cached prompt's ``Close`` comes when the statistics of its session are sent.
        is_counted = session in self.session_bytes or not isinstance(message, Close)
        if size and session is not None and is_counted:
            self.session_bytes[session] += size
        return size

    def take_bytes(self, session: int) -> int:
        """Bytes written for a session so far, which are counted no further."""
        return self.session_bytes.pop(session, 0)

    def flush(self) -> None:
        """Write the held messages."""
        while self._holding:
            self._holding.popleft().flush()
