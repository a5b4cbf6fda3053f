"""Where a node's messages go: in, to its machine or the services of its process; out, to its links.

Law of this module: messages of one step are held until the whole step is performed, then written.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from typing import Any, ClassVar

from asyncspec.actor.link import Link
from asyncspec.backend import row_compression
from asyncspec.core.jobs import TensorRows
from asyncspec.core.machine import Emit, Finish, Input, LinkDown, LinkUp, Received
from asyncspec.core.tensors import Tensors, WireTensor
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.framing import Frame
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import Close, Fault, Hello, Message, Restore, Welcome

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

    def emit_features(self, effect: Emit, features: WireTensor) -> None:
        """Features of the target for a user."""

    def finish(self, effect: Finish) -> None:
        """The end of a request."""

    def refused(self, rank: Rank, reason: str) -> None:
        """A handshake with a node has failed, whichever side dialled and whichever refused. Called
        once for each reason until the node joins. ``rank`` -1: whose certificate was refused here
        before it had said who it is."""


class Incoming:
    """Feeds the machine with the mesh's events; services handle messages of other types."""

    def __init__(
        self, feed: Callable[[Input], None], tensors: Tensors | None, host: Host, me: Hello
    ) -> None:
        self.refused = host.refused
        self._feed = feed
        self._tensors = tensors
        self._me = me
        self._services: list[LinkService] = []
        self._handlers: dict[type[Any], LinkService] = {}
        self.add(host)

    def add(self, service: LinkService) -> None:
        """``service`` handles its messages from now on."""
        self._services.append(service)
        self._handlers.update(dict.fromkeys(service.senders, service))

    def joined(self, link: Link) -> None:
        """A handshake is done, with a node or a client."""
        self._tell(link, LinkUp(link.rank), lambda service: service.joined(link))

    def lost(self, link: Link, reason: str) -> None:
        """A link that had joined is gone."""
        event = LinkDown(link.rank, reason, link.silent_seconds)
        self._tell(link, event, lambda service: service.lost(link, reason))

    def _tell(self, link: Link, event: Input, tell: Callable[[LinkService], None]) -> None:
        """Tell all services, then the machine, also where one of them raises."""
        with ExitStack() as calls:  # the last one is the first to be made
            if link.rank >= 0:
                calls.callback(self._feed, event)
            for service in reversed(self._services):
                calls.callback(tell, service)

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
        self._feed(Received(link.rank, message, self._unpack(frame, peer), seconds))

    def _unpack(self, frame: Frame, peer: Hello | Welcome) -> object | None:
        if frame.tensor is None or frame.data is None:
            return None
        # First of all, as it may take seconds to unpack one.
        if self._tensors is None or not _bears_tensors(peer, self._me):
            raise RemoteProtocolError(
                f"rank {peer.rank} may not send tensors to rank {self._me.rank}"
            )
        wire = WireTensor(frame.tensor.dtype, frame.tensor.shape, frame.data)
        try:
            return self._tensors.unpack(row_compression.unpack(wire))
        except ValueError as error:
            raise RemoteProtocolError(str(error)) from error


def _bears_tensors(peer: Hello | Welcome, me: Hello) -> bool:
    """Whether a peer's messages have tensors: hidden states of the stage before this one, features
    of the last stage, or of a draft node for a token source."""
    match me.role:
        case "verify":
            return peer.role == "verify" and peer.rank == me.rank - 1
        case "source":
            return peer.role == "draft"
        case _:
            return peer.role == "verify" and peer.rank == me.stages


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
            tensor = self.pack(rows)
            if link.packs:
                tensor = row_compression.pack(tensor)
        # Rows give another device work, so they precede control messages.
        (self._holding.append if tensor is None else self._holding.appendleft)(link)
        size = link.hold(message, tensor)
        session = getattr(message, "session", None)
        # A cached prompt's ``Close`` comes when the statistics of its session are sent.
        is_counted = session in self.session_bytes or not isinstance(message, Close | Restore)
        if size and session is not None and is_counted:
            self.session_bytes[session] += size
        return size

    def pack(self, rows: TensorRows) -> WireTensor:
        """Rows as they travel."""
        assert self._tensors is not None
        return self._tensors.pack(rows)

    def take_bytes(self, session: int) -> int:
        """Bytes written for a session so far, which are counted no further."""
        return self.session_bytes.pop(session, 0)

    def flush(self) -> None:
        """Write the held messages."""
        while self._holding:
            self._holding.popleft().flush()
