"""Where a node's messages go, without sockets."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actor.local_cluster import hello
from asyncspec.actor.link import Link
from asyncspec.actor.routing import Host, Incoming, LinkService, Outgoing, Senders
from asyncspec.backend.row_compression import PACKED
from asyncspec.core.jobs import TensorRows
from asyncspec.core.machine import Input, LinkDown, LinkUp, Received
from asyncspec.core.tensors import WireTensor
from asyncspec_protocol.base import TensorSpec
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.framing import Frame
from asyncspec_protocol.ids import NodeId, Rank, SegmentId, SessionId, Version, draft_rank, is_draft
from asyncspec_protocol.links import client_hello, role_of
from asyncspec_protocol.messages import (
    Close,
    Credit,
    Fault,
    Features,
    Floor,
    Hello,
    Inspect,
    Message,
    Segment,
    Submit,
    Verdict,
)

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


def receiving(
    fed: list[Input], *, rank: int = 0, stages: int = 1, tensors: Packing | None = None
) -> Incoming:
    """What a node of this rank does with messages; its machine's inputs."""
    return Incoming(fed.append, tensors, Host(), hello(rank, stages))


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


class FailingService(StatusService):
    def joined(self, link: Link) -> None:
        raise ArithmeticError

    def lost(self, link: Link, reason: str) -> None:
        raise ArithmeticError


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
    incoming, service = receiving(fed, tensors=Packing()), StatusService()
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
    incoming = receiving(fed)
    incoming.add(StatusService())
    link = cast(Link, FakeLink(peer, []))
    with pytest.raises(RemoteProtocolError, match=f"{peer.role}' may not send"):
        incoming.frame(link, Frame(message))
    assert not fed


@pytest.mark.parametrize("rank", [0, -1])
def test_a_link_is_over_for_all_though_a_service_fails(rank: int) -> None:
    """And what has failed is told."""
    fed: list[Input] = []
    incoming, services = receiving(fed), [FailingService(), StatusService(), FailingService()]
    for service in services:
        incoming.add(service)
    link = cast(Link, FakeLink(hello(0, 1) if rank == 0 else client_hello(), []))
    with pytest.raises(ArithmeticError):
        incoming.joined(link)
    with pytest.raises(ArithmeticError):
        incoming.lost(link, "over")
    assert services[1].log == ["joined", "over"]
    assert fed == ([LinkUp(Rank(0)), LinkDown(Rank(0), "over", 1.5)] if rank == 0 else [])


ROWS = TensorSpec("float32", (1, 2))
SEGMENT = Segment(SessionId(0), SegmentId(0), Version(0), (NodeId(0),), (NodeId(-1),), aux_states=0)
VERDICT = Verdict(SessionId(0), SegmentId(0), Version(0), (), (), (NodeId(0),))
FEATURES = Features(SessionId(0), 0, 1)


def sends_tensors(sender: int, receiver: int, stages: int) -> bool:
    """Hidden states go from stage to stage, features to draft nodes and from them to a source."""
    return {
        "verify": sender == receiver - 1 > 0,
        "draft": sender == stages,
        "source": is_draft(sender),
    }[role_of(receiver, stages)]


@given(st.integers(1, 3), st.data())
def test_tensors_are_taken_from_those_alone_who_may_send_them(stages: int, data: Any) -> None:
    """The others' are not even looked at, which takes seconds where they are packed."""
    ranks = [0, *range(1, stages + 2), draft_rank(3)]
    sender, receiver = (data.draw(st.sampled_from(ranks)) for _ in range(2))
    message = data.draw(st.sampled_from([SEGMENT, VERDICT, FEATURES]))
    fed: list[Input] = []
    incoming = receiving(fed, rank=receiver, stages=stages, tensors=Packing())
    link = cast(Link, FakeLink(hello(sender, stages), []))
    good = Frame(message, ROWS, memoryview(bytes(8)))
    # Which is found where it is unpacked.
    malformed = Frame(message, TensorSpec(PACKED, (1, 8)), memoryview(bytes(8)))
    if sends_tensors(sender, receiver, stages):
        incoming.frame(link, good)
        assert fed == [Received(link.rank, message, bytes(8), 4.0)]
        with pytest.raises(RemoteProtocolError, match="packed rows of 8 bytes"):
            incoming.frame(link, malformed)
    else:
        for frame in (good, malformed):
            with pytest.raises(RemoteProtocolError, match=f"rank {sender} may not send tensors"):
                incoming.frame(link, frame)
        assert not fed
