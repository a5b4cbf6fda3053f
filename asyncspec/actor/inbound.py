"""Who stands around a runtime: the process, who delivers its trace, who answers how it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from asyncspec.actor.link import Link
from asyncspec.backend import row_compression
from asyncspec.backend.base import Tensors, WireTensor
from asyncspec.core.machine import Emit, Finish, Input, LinkDown, LinkUp, Received
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.framing import Frame
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import (
    Cancel,
    Collect,
    Events,
    Fault,
    Hello,
    Inspect,
    PlanStatus,
    PlanStatusRequest,
    Status,
    Submit,
    Welcome,
)


class HostCallbacks(Protocol):
    """The process around a runtime."""

    def emit(self, effect: Emit) -> None:
        """Certain tokens for a user."""

    def finish(self, effect: Finish) -> None:
        """The end of a request."""

    def client(self, link: Link, message: Submit | Cancel) -> None:
        """A client asks for something."""

    def client_gone(self, link: Link) -> None:
        """A client has closed its link."""

    def changed(self, peer: Rank, up: bool, reason: str) -> None:
        """A link to a node came up, went down, or was refused."""


class TraceCollector(Protocol):
    """Delivers what a node's tap has kept."""

    def joined(self, link: Link) -> None:
        """A link to a node came up."""

    def gone(self, link: Link) -> None:
        """A link to a node or a client is gone."""

    def collect(self, link: Link, message: Collect) -> None:
        """Somebody asks for the trace."""

    def events(self, link: Link, message: Events, frame: Frame) -> None:
        """Part of a stage's trace."""


class Inspector(Protocol):
    """Answers how this node is."""

    def inspect(self, link: Link, message: Inspect) -> None:
        """A client or the draft node asks."""

    def status(self, link: Link, message: Status) -> None:
        """Another node has answered."""

    def plan_status_request(self, link: Link, message: PlanStatusRequest) -> None:
        """A client or a draft node asks what is planned."""

    def plan_status(self, link: Link, message: PlanStatus) -> None:
        """The first stage has answered."""

    def gone(self, link: Link) -> None:
        """A link to a node or a client is gone."""


# --- What comes over a node's links: inputs for its machine, and words for who stands around it.

_OURS = (
    *(Fault, Collect, Events, Inspect, Status, PlanStatusRequest, PlanStatus),
    *(Submit, Cancel, Hello, Welcome),
)
"""What a node's machine never hears of."""


class Incoming:
    """Dispatches the events of the mesh (implements ``MeshCallbacks``).

    ``feed`` takes inputs of the machine. ``collector`` answers requests for the trace and
    ``inspector`` requests for the node's status, if there are any.
    """

    def __init__(
        self,
        rank: Rank,
        feed: Callable[[Input], None],
        tensors: Tensors | None,
        host: HostCallbacks,
    ) -> None:
        self.collector: TraceCollector | None = None
        self.inspector: Inspector | None = None
        self._rank = rank
        self._feed = feed
        self._tensors = tensors
        self._host = host

    def joined(self, link: Link) -> None:
        """See ``MeshCallbacks``."""
        if link.rank >= 0:
            self._host.changed(link.rank, True, "")
            self._feed(LinkUp(link.rank))
            if self.collector is not None:
                self.collector.joined(link)

    def lost(self, link: Link, reason: str) -> None:
        """See ``MeshCallbacks``."""
        if self.collector is not None:
            self.collector.gone(link)
        if self.inspector is not None:
            self.inspector.gone(link)
        if link.rank < 0:
            self._host.client_gone(link)
            return
        self._host.changed(link.rank, False, reason)
        self._feed(LinkDown(link.rank, reason))

    def refused(self, rank: Rank, reason: str) -> None:
        """See ``MeshCallbacks``."""
        self._host.changed(rank, False, reason)

    def frame(self, link: Link, frame: Frame) -> None:
        """See ``MeshCallbacks``."""
        message = frame.message
        if link.rank >= 0 and not isinstance(message, _OURS):
            handle = self._unpack(frame)
            seconds = 0.0 if frame.data is None else link.byte_seconds * frame.data.nbytes
            self._feed(Received(link.rank, message, handle, seconds))
        elif isinstance(message, Fault):
            link.close(message.text)
        elif isinstance(message, Collect | Events):
            self._trace(link, message, frame)
        elif isinstance(message, Inspect | Status | PlanStatusRequest | PlanStatus):
            self._inspect(link, message)
        elif link.rank < 0:
            if not isinstance(message, Submit | Cancel):
                raise RemoteProtocolError(f"a client may not send {type(message).__name__}")
            self._host.client(link, message)
        else:
            raise RemoteProtocolError(f"a node may not send {type(message).__name__} here")

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

    def _trace(self, link: Link, message: Collect | Events, frame: Frame) -> None:
        """Traces are asked for by clients and by draft nodes, and given by stages."""
        if isinstance(message, Events) == link.asks:
            raise RemoteProtocolError(f"this peer may not send {type(message).__name__}")
        if isinstance(message, Events):
            if self.collector is not None:
                self.collector.events(link, message, frame)
        elif self.collector is not None:
            self.collector.collect(link, message)
        else:
            link.send(Events(message.collection, self._rank, True, "this node keeps no trace"))

    def _inspect(
        self, link: Link, message: Inspect | Status | PlanStatusRequest | PlanStatus
    ) -> None:
        """Clients and draft nodes ask, the other nodes answer."""
        if isinstance(message, Status | PlanStatus) == link.asks:
            raise RemoteProtocolError(f"this peer may not send {type(message).__name__}")
        if self.inspector is None:
            raise RemoteProtocolError("this node does not say how it is")
        match message:
            case Inspect():
                self.inspector.inspect(link, message)
            case Status():
                self.inspector.status(link, message)
            case PlanStatusRequest():
                self.inspector.plan_status_request(link, message)
            case PlanStatus():
                self.inspector.plan_status(link, message)
