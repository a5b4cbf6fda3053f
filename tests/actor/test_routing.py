"""Where a node's messages go, without sockets."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import pytest

from actor.local_cluster import hello
from asyncspec.actor.link import Link
from asyncspec.actor.routing import Host, Incoming, LinkService, Outgoing, Senders
from asyncspec.backend.base import WireTensor
from asyncspec.core.jobs import TensorRows
from asyncspec.core.machine import Input, LinkDown, LinkUp, Received
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.framing import Frame
from asyncspec_protocol.ids import Rank, SessionId
from asyncspec_protocol.links import client_hello
from asyncspec_protocol.messages import Close, Credit, Fault, Floor, Hello, Inspect, Message, Submit

SUBMIT = Submit(1, "Once", 9, 3, 0.0, 0, 1.0)
SIZE = 10


class FakeLink:
    """Takes ``SIZE`` bytes for each message while it is up."""

    def __init__(self, peer: Hello, log: list[str]) -> None:
        self.peer = peer
        self.rank = peer.rank
        self.byte_seconds = 0.5
        self.silent_seconds = 1.5
        self.packs = False
        self.up = True
        self.closed = ""
        self._log = log

    def hold(self, message: Message, tensor: WireTensor | None = None) -> int:
        return SIZE if self.up else 0

    def flush(self) -> None:
        self._log.append(f"rank {self.rank}")

    def close(self, reason: str) -> None:
        self.closed = reason


class Packing:
    """A backend's tensors."""

    def pack(self, rows: TensorRows) -> WireTensor:
        return WireTensor("uint8", (1,), memoryview(b"x"))

    def unpack(self, tensor: WireTensor) -> object:
        return bytes(tensor.data)


class StatusService(LinkService):
    senders: ClassVar[Senders] = {Inspect: ("client", "draft")}

    def __init__(self) -> None:
        self.log: list[Any] = []

    def joined(self, link: Link) -> None:
        self.log.append("joined")

    def lost(self, link: Link, reason: str) -> None:
        self.log.append(reason)

    def received(self, link: Link, message: Any, data: memoryview | None) -> None:
        self.log.append(message)


def outgoing(*links: FakeLink) -> Outgoing:
    return Outgoing(cast(Any, {link.rank: link for link in links}), Packing())


def test_bytes_are_counted_by_session_until_its_statistics_are_sent() -> None:
    first, second = FakeLink(hello(1, 2), []), FakeLink(hello(2, 2), [])
    sending = outgoing(first, second)
    close = Close(SessionId(7))
    assert sending.send(Rank(1), Floor(SessionId(3))) == SIZE
    assert sending.send(Rank(9), close) == 0
    assert not sending.session_bytes
    sending.session_bytes[7] = 1
    assert sending.send(Rank(1), close) == sending.send(Rank(2), close) == SIZE
    assert sending.take_bytes(7) == 1 + 2 * SIZE
    assert sending.take_bytes(7) == 0
    # Of a cached prompt.
    assert sending.send(Rank(1), close) == SIZE
    first.up = False
    assert sending.send(Rank(1), close) == 0
    assert not sending.session_bytes


def test_rows_are_written_before_control_messages() -> None:
    log: list[str] = []
    sending = outgoing(FakeLink(hello(1, 2), log), FakeLink(hello(2, 2), log))
    sending.send(Rank(1), Credit(1))
    sending.send(Rank(2), Credit(1), TensorRows(None, (0,)))
    assert not log
    sending.flush()
    assert log == ["rank 2", "rank 1"]


def test_messages_reach_their_service_and_all_others_the_machine() -> None:
    fed: list[Input] = []
    incoming, service = Incoming(fed.append, Packing(), Host()), StatusService()
    incoming.add(service)
    draft, client = (cast(Link, FakeLink(peer, [])) for peer in (hello(0, 1), client_hello()))
    for link in (draft, client):
        incoming.joined(link)
        incoming.frame(link, Frame(Inspect(3)))
        incoming.lost(link, "over")
    assert service.log == 2 * ["joined", Inspect(3), "over"]
    incoming.frame(draft, Frame(Credit(1)))
    incoming.frame(draft, Frame(Fault("busy", "too many")))
    assert fed == [LinkUp(Rank(0)), LinkDown(Rank(0), "over", 1.5), Received(Rank(0), Credit(1))]
    assert cast(FakeLink, draft).closed == "too many"


@pytest.mark.parametrize(
    ("peer", "message"),
    [(hello(1, 1), Inspect(3)), (client_hello(), Credit(1)), (client_hello(), SUBMIT)],
)
def test_a_message_of_another_role_is_refused(peer: Hello, message: Message) -> None:
    fed: list[Input] = []
    incoming = Incoming(fed.append, None, Host())
    incoming.add(StatusService())
    link = cast(Link, FakeLink(peer, []))
    with pytest.raises(RemoteProtocolError, match=f"{peer.role}' may not send"):
        incoming.frame(link, Frame(message))
    assert not fed
