"""What one segment costs an idle node without layers, from receipt to sending it on.

The node is a child process on loopback.
"""

from __future__ import annotations

import socket
import statistics
import struct
import subprocess
import sys
import time
from contextlib import closing
from itertools import count

import msgspec

from asyncspec.core.errors import ClusterError
from asyncspec_protocol.base import TensorSpec
from asyncspec_protocol.framing import FrameReader, write_frame
from asyncspec_protocol.ids import NodeId, Rank, SegmentId, SessionId, Version
from asyncspec_protocol.messages import (
    PROTOCOL_VERSION,
    Credit,
    Hello,
    Message,
    Open,
    Segment,
    Welcome,
)
from tools.bench.limits import relay
from tools.bench.limits.cpu_time import cpu_seconds

ROWS, WIDTH = 16, 4096
WARM_UP = 100
PATIENCE_SECONDS = 60.0
PREFIX = struct.Struct("!II")
"""Lengths of a frame's header and tensor, as in ``asyncspec_protocol.framing``."""


class Timing(msgspec.Struct, frozen=True):
    """Per segment, in microseconds."""

    # Median round trip.
    node: float
    # Processor time of all threads of the node.
    node_cpu: float
    # Bytes that came back.
    bytes: int


def measure(rounds: int = 2000) -> Timing:
    """Send segments of ``ROWS`` rows one after another. Raises ``ClusterError``."""
    with closing(NodeUnderTest()) as node:
        size = node.ping(node.prepare())
        _round_trips(node, WARM_UP)
        before = node.cpu_seconds()
        seconds = _round_trips(node, rounds)
        used = node.cpu_seconds() - before
    return Timing(1e6 * statistics.median(seconds), 1e6 * used / rounds, size)


def _round_trips(node: NodeUnderTest, rounds: int) -> list[float]:
    """Seconds of every round trip."""
    taken = []
    for _ in range(rounds):
        frame = node.prepare()
        start = time.perf_counter()
        node.ping(frame)
        taken.append(time.perf_counter() - start)
    return taken


class Child:
    """A process that says its port on its standard output."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.stop()
            raise ClusterError(f"{command[0]} did not start")
        self.port = int(line)
        self.pid = self._process.pid

    def cpu_seconds(self) -> float:
        """See ``cpu_time``."""
        return cpu_seconds(self._process.pid)

    def stop(self) -> None:
        """Kill it and wait."""
        self._process.kill()
        self._process.communicate()


class NodeUnderTest:
    """A relay between us as its neighbours and its draft node: a segment in, a segment out."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        command = [relay.__file__, "--width", str(WIDTH), "--next-port", str(port)]
        self._child = Child(command)
        try:
            listener.settimeout(PATIENCE_SECONDS)
            self._after = Peer(prompt(listener.accept()[0]))
            self._after.expect(Hello)
            self._after.send(welcome(relay.RANK + 1))
            self._draft, self._before = (Peer(dial(self._child.port)) for _ in range(2))
            for rank, peer in ((0, self._draft), (relay.RANK - 1, self._before)):
                peer.send(relay.hello(rank))
                peer.expect(Welcome)
            self._after.send(Credit(limit=2**31))
            self._before.expect(Credit)
            most = 2**24
            self._before.send(Open(SessionId(1), most, most, 0, 0.0, 0, 1.0))
        except BaseException:
            self._child.stop()
            raise
        finally:
            listener.close()
        self._segments = map(segment_frame, count(1))

    def close(self) -> None:
        """End it."""
        for peer in (self._draft, self._before, self._after):
            peer.close()
        self._child.stop()

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._child.pid

    def cpu_seconds(self) -> float:
        """See ``Child``."""
        return self._child.cpu_seconds()

    def prepare(self) -> bytes:
        """The next segment as bytes."""
        return next(self._segments)

    def ping(self, frame: bytes) -> int:
        """A segment to the node, and what comes of it. Its bytes."""
        self._before.send_bytes(frame)
        return self._after.receive(len(frame) // 2)


def segment_frame(number: int) -> bytes:
    """A chunk of a prompt with its hidden states, as the stage before would send it."""
    first = (number - 1) * ROWS
    ids = tuple(NodeId(first + i) for i in range(ROWS))
    segment = Segment(
        session=SessionId(1),
        segment=SegmentId(number),
        applied=Version(0),
        ids=ids,
        parents=tuple(NodeId(i - 1) for i in ids),
    )
    spec = TensorSpec("bfloat16", (ROWS, WIDTH))
    return b"".join(write_frame(segment, spec, memoryview(bytes(spec.nbytes))))


class Peer:
    """A neighbour of the node on a blocking socket; it takes no notice of heartbeats."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader = FrameReader()
        self._into = memoryview(bytearray(2**20))
        self._filled = 0

    def send(self, message: Message) -> None:
        """Write a message without a tensor."""
        self.send_bytes(b"".join(write_frame(message)))

    def send_bytes(self, frame: bytes) -> None:
        """Write a frame."""
        self._sock.sendall(frame)

    def expect(self, kind: type[Message]) -> None:
        """Read up to a message of this kind. All of them before the first ``receive``, and then
        there is nothing behind the last."""
        while True:
            while (frame := self._reader.next_frame()) is not None:
                if isinstance(frame.message, kind):
                    return
            got = self._sock.recv_into(self._reader.get_buffer())
            if not got:
                raise ClusterError("the node has closed the connection")
            self._reader.buffer_updated(got)

    def receive(self, least: int) -> int:
        """Read up to the end of the next frame of at least so many bytes, which it returns. Shorter
        ones are heartbeats."""
        while True:
            got = self._sock.recv_into(self._into[self._filled :])
            if not got:
                raise ClusterError("the node has closed the connection")
            self._filled += got
            while self._filled >= PREFIX.size:
                header, tensor = PREFIX.unpack(self._into[: PREFIX.size])
                size: int = PREFIX.size + header + tensor
                if self._filled < size:
                    break
                self._into[: self._filled - size] = self._into[size : self._filled]
                self._filled -= size
                if size >= least:
                    return size

    def close(self) -> None:
        """Hang up."""
        self._sock.close()


def dial(port: int) -> socket.socket:
    """A connection to a child."""
    return prompt(socket.create_connection(("127.0.0.1", port)))


def prompt(sock: socket.socket) -> socket.socket:
    """The same socket, which sends at once and does not wait for ever."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(PATIENCE_SECONDS)
    return sock


def welcome(rank: int) -> Welcome:
    """The answer to a hello, by the node of another rank."""
    fields = msgspec.structs.asdict(relay.hello(rank))
    assert fields["protocol"] == PROTOCOL_VERSION
    return Welcome(**{**fields, "rank": Rank(rank)})
