"""One framed TCP link: bytes to messages and back, heartbeats, and a clear end.

A link knows nothing of sessions. It never waits: what flows on it is bounded by credit, and a peer
that does not read is given up.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

from msgspec import Struct

from asyncspec.actor import tcp
from asyncspec.actor.silence import SilenceWatch
from asyncspec.core.cost_model.bandwidth import NEVER_PACK, BandwidthEstimator, should_pack
from asyncspec.core.machine import TraceHook
from asyncspec.core.tensors import WireTensor
from asyncspec_protocol.base import TensorSpec
from asyncspec_protocol.errors import RemoteProtocolError, printable
from asyncspec_protocol.framing import Frame, FrameReader, write_frame
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.limits import MAX_SECONDS
from asyncspec_protocol.messages import Clock, Fault, Heartbeat, Hello, Message, Welcome

Certificate = Mapping[str, Any]
"""As ``ssl.SSLSocket.getpeercert`` describes it."""

SILENT_BEATS = 2.0
"""Heartbeat intervals without a byte after which a trace gets a record."""

MAX_JOINED = 32 * 1024
"""Bytes of a tensor that is copied behind its header: a write of its own costs more."""

CLOSED = "the peer closed the connection"
"""Why a link is down where the peer gives no reason."""

OWN_ERROR = "an error of this node itself ended the link; its log describes it"
"""Why a link is down where our own code fails on a message."""


class LinkOptions(Struct, frozen=True):
    """Times in seconds, sizes in bytes."""

    # Between two heartbeats to a peer, once the handshake is done: .04 % of a core a link.
    heartbeat_seconds: float = 0.5
    # A peer whose process is silent for so long is gone; its machine sooner (``actor.silence``).
    timeout_seconds: float = 10.0
    # A dialling peer must send ``Hello`` within this time.
    hello_seconds: float = 10.0
    # For the answer, which waits for the other side to load its model.
    welcome_seconds: float = 600.0
    # For an attempt to connect, TLS included, before the next one: the system's own attempts to
    # reach a machine that is off get rarer, up to a minute apart.
    dial_seconds: float = 10.0
    # Pause before a lost peer is dialled again: doubled from the first to the second.
    redial_seconds: tuple[float, float] = (0.05, 2.0)
    # Bytes a peer may leave unread before it is given up.
    most_unsent: int = 512 * 1024 * 1024
    # The same for a client, to which no tensors go but traces, and features of prompts for the few
    # that request them: 512 positions of four depths of a model of 8B take 16 MiB.
    most_unsent_client: int = 64 * 1024 * 1024
    # Connections whose handshake is not done: a further one is closed. And clients: a further one
    # is refused.
    most_strangers: int = 512
    most_clients: int = 1024
    # Frames that have come together are handled for so long at a time: what else the event loop has
    # to do comes in between, such as HTTP requests.
    taking_seconds: float = 5e-3
    # Seconds a byte that packing rows here and unpacking them there take: they are packed where
    # the link saves more (``asyncspec.core.cost_model``).
    packing_seconds: float = NEVER_PACK


class Link(asyncio.BufferedProtocol):
    """One connection. ``peer``: the other side's facts, once the handshake is done."""

    def __init__(
        self,
        options: LinkOptions,
        received: Callable[[Link, Frame], None],
        closed: Callable[[Link, str], None],
    ) -> None:
        self.peer: Hello | Welcome | None = None
        # Whether the peer may record traces: as its certificate says.
        self.operator = True
        self.bytes_sent = 0
        self.bytes_received = 0
        # Round trip by heartbeats, seconds; None before the first echo.
        self.rtt: float | None = None
        # Whether the link is so slow that packed rows pay.
        self.packs = should_pack(False, 0.0, options.packing_seconds)
        # Whether no frame is taken for now (``hold_reading``).
        self.holds_reading = False
        # Receives events of the connection, while the node is traced.
        self.hook: TraceHook | None = None
        # Start of a stall of the write buffer, and its bytes.
        self._stalled: tuple[float, int] | None = None
        self._loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[str] = self._loop.create_future()
        self._options = options
        self._received = received
        self._closed = closed
        self._reader = FrameReader(trusted=False, allocate=_uninitialised)
        self._bandwidth = BandwidthEstimator()
        self._transport: asyncio.Transport | None = None
        # Pieces of frames for ``flush``, short ones joined. A long tensor is a piece of its own: it
        # is not copied, and the header before it wakes the peer while the kernel still copies it.
        self._held: list[bytes | memoryview] = []
        self._reason = ""
        self._over = False
        # When bytes came last.
        self._received_at = 0.0
        self._silence: SilenceWatch | None = None
        # The peer's clock in its last heartbeat, 0 if none waits for its echo, and when that came.
        self._echo = self._came = 0.0
        self._beat: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def rank(self) -> Rank:
        """The peer's rank; -1 for a client or before the handshake."""
        return Rank(-1) if self.peer is None else self.peer.rank

    @property
    def certificate(self) -> Certificate | None:
        """The peer's, verified, as ``getpeercert`` has it and as DER (``"der"``); None without
        TLS."""
        transport = self._transport
        ssl_object = None if transport is None else transport.get_extra_info("ssl_object")
        if ssl_object is None:
            return None
        return {**ssl_object.getpeercert(), "der": ssl_object.getpeercert(binary_form=True)}

    @property
    def byte_seconds(self) -> float:
        """Seconds a byte of a large frame from the peer; 0 before it is known."""
        return self._bandwidth.byte_seconds

    # The methods of ``asyncio.BufferedProtocol``.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        tcp.keep_alive(transport)
        if self._over:  # closed before, as while TLS was being agreed on
            self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        missing = self._reader.missing
        if missing > nbytes:
            self._bandwidth.on_read(missing - nbytes, time.monotonic())
        elif missing:
            self._bandwidth.on_frame_end()
        self.bytes_received += nbytes
        previous = self._received_at
        now = self._received_at = self._loop.time()
        if self._silence is not None:
            self._silence.received()
        if (
            self.hook is not None
            and now - previous > SILENT_BEATS * self._options.heartbeat_seconds
        ):
            self.hook.silent(self.rank, previous, now)
        self._reader.buffer_updated(nbytes)
        if not self._take_frames(self._options.taking_seconds):
            assert self._transport is not None
            self._transport.pause_reading()
            self._take_later()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        assert self._transport is not None
        self._stalled = (time.monotonic(), self._transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        if self._stalled is not None and self.hook is not None:
            at, nbytes = self._stalled
            self.hook.blocked(self.rank, at, time.monotonic(), nbytes)
        self._stalled = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._take_frames(math.inf)  # those of the last read
        for timer in (self._beat, self._deadline):
            if timer is not None:
                timer.cancel()
        self._transport = None
        if self._over:
            return
        self._over = True
        reason = self._reason or (str(exc) if exc else CLOSED)
        if not self.gone.done():
            self.gone.set_result(reason)
        self._closed(self, reason)

    def send(self, message: Message, tensor: WireTensor | None = None) -> int:
        """Write a message; returns its bytes, 0 where the link is down. Those of ``tensor`` must
        not change afterwards: part of them may still wait here."""
        size = self.hold(message, tensor)
        self.flush()
        return size

    def hold(self, message: Message, tensor: WireTensor | None = None) -> int:
        """``send``, but not before ``flush``: messages written together wake the peer once."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return 0
        if tensor is None:
            frame = write_frame(message)
        else:
            frame = write_frame(message, TensorSpec(tensor.dtype, tensor.shape), tensor.data)
        if tensor is not None and tensor.data.nbytes <= MAX_JOINED:
            frame = (b"".join(frame),)
        held = self._held
        if held and isinstance(last := held[-1], bytes):
            held[-1] = last + frame[0]
        else:
            held.append(frame[0])
        held.extend(frame[1:])
        size = len(frame[0]) + (0 if tensor is None else tensor.data.nbytes)
        self.bytes_sent += size
        return size

    def flush(self) -> None:
        """Write what is held."""
        transport, held = self._transport, self._held
        if not held:
            return
        self._held = []
        if transport is None or transport.is_closing():
            return
        for piece in held:
            transport.write(piece)
        options = self._options
        client = self.peer is not None and self.peer.role == "client"
        max_unsent = options.most_unsent_client if client else options.most_unsent
        if transport.get_write_buffer_size() > max_unsent:
            self.abort("the peer does not read")

    @property
    def silent_seconds(self) -> float:
        """Since the peer was heard last."""
        return max(0.0, self._loop.time() - self._received_at)

    @property
    def unsent(self) -> int:
        """Bytes that wait for the network."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def probe_clock(self) -> None:
        """Request the peer's clock; the answer goes to the hook."""
        self.send(Clock(asked=time.monotonic()))

    def expect(self, seconds: float, what: str) -> None:
        """Give up unless ``accepted`` is called in time."""
        self._deadline = self._loop.call_later(seconds, self.abort, f"no {what} in {seconds:g} s")

    def accepted(self, peer: Hello | Welcome) -> None:
        """The handshake is done: heartbeats from now on."""
        self.peer = peer
        self._reader.trusted = True
        if self._deadline is not None:
            self._deadline.cancel()
        self._received_at = self._loop.time()
        self._silence = SilenceWatch(
            self._options.heartbeat_seconds, self._options.timeout_seconds, self._received_at
        )
        self._tick()

    def refuse(self, fault: Fault) -> None:
        """Send the reason, then close."""
        self._set_reason(fault.text)
        self.send(fault)
        self.close(fault.text)

    def close(self, reason: str) -> None:
        """Send what is queued, then close."""
        self._set_reason(reason)
        self.flush()
        if self._transport is not None:
            self._transport.close()
        else:
            self.connection_lost(None)

    def abort(self, reason: str) -> None:
        """Close at once; what is queued is lost."""
        self._set_reason(reason)
        if self._transport is not None:
            self._transport.abort()
        else:  # without a connection, or in its TLS handshake, asyncio does not call it
            self.connection_lost(None)

    def _set_reason(self, reason: str) -> None:
        """The first reason counts. It may be a peer's text, and goes into logs."""
        self._reason = self._reason or printable(reason)

    def hold_reading(self, hold: bool) -> None:
        """Take no frames until further notice, or go on. Meanwhile the peer, whose heartbeats are
        not read either, does not count as silent."""
        if hold == self.holds_reading or self._over:
            return
        self.holds_reading = hold
        if not hold:
            self._take_later()
        elif self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def _tick(self) -> None:
        assert self._silence is not None
        now = self._loop.time()
        if self.holds_reading:
            self._received_at = now
            self._silence.received()
        if reason := self._silence.check(tcp.path_state(self._transport), now):
            self.abort(reason)
            return
        self._send_beat()
        self._beat = self._loop.call_later(self._options.heartbeat_seconds, self._tick)

    def _send_beat(self) -> None:
        now = time.monotonic()  # uvloop's clock has whole milliseconds
        echo = self._echo and min(MAX_SECONDS, self._echo + (now - self._came))
        self.send(Heartbeat(sent=now, echo=echo, byte_seconds=self.byte_seconds))
        self._echo = 0.0

    def _take_frames(self, seconds: float) -> bool:
        """Handle complete frames for so long; whether more may be read."""
        until = time.monotonic() + seconds
        try:
            while not self._reason and not self.holds_reading:
                if (frame := self._reader.next_frame()) is None:
                    return True
                self._take(frame)
                if time.monotonic() >= until:
                    break
        except RemoteProtocolError as error:
            self.refuse(Fault(code="protocol", text=error.text))
        except Exception as error:
            context = {"message": f"a message of rank {self.rank} ends its link"}
            self._loop.call_exception_handler({**context, "exception": error, "protocol": self})
            self.refuse(Fault(code="internal", text=OWN_ERROR))
        return bool(self._reason)

    def _take_later(self) -> None:
        if not self.holds_reading:
            self._loop.call_soon(self._take_more)

    def _take_more(self) -> None:
        if not self._take_frames(self._options.taking_seconds):
            self._take_later()
        elif self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _take(self, frame: Frame) -> None:
        """Handle a frame: heartbeats and clock probes here, all others by ``received``."""
        message, now = frame.message, time.monotonic()
        if isinstance(message, Heartbeat):
            if message.echo:
                # Bytes wait at both ends, so this is an upper bound; keep the least.
                trip = max(0.0, now - message.echo)
                self.rtt = trip if self.rtt is None else min(self.rtt, trip)
            self._echo, self._came = message.sent, now
            seconds = message.byte_seconds
            self.packs = should_pack(self.packs, seconds, self._options.packing_seconds)
            if self.rank < 0:
                self._send_beat()
        elif isinstance(message, Clock) and self.peer is not None:
            if not message.answered:
                self.send(Clock(asked=message.asked, answered=now))
            elif self.hook is not None:
                self.hook.probed(self.rank, message.asked, message.answered, now)
        else:
            self._received(self, frame)


def _uninitialised(size: int) -> memoryview:
    """Memory that is not zeroed: zeroing costs as much as receiving."""
    import numpy as np  # loaded already where tensors are received, not needed elsewhere

    return np.empty(size, np.uint8).data
