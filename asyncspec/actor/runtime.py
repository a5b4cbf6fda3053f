"""The asyncio reader of effects: feeds inputs to one machine and performs what it asks for.

Law of this file: it decides nothing. What a node does is in its machine; here are only sockets,
threads and timers.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, assert_never

from asyncspec.actor.device import Device
from asyncspec.actor.link import Link, LinkOptions
from asyncspec.actor.machine import (
    Abandon,
    Arm,
    Compute,
    Computed,
    Effect,
    Emit,
    Finish,
    Fired,
    Input,
    Joined,
    Lost,
    Machine,
    Plan,
    Planned,
    Received,
    Report,
    Send,
)
from asyncspec.actor.memo import Memo
from asyncspec.actor.mesh import Address, Mesh, Security
from asyncspec.actor.tap import Tap
from asyncspec.backend import packed
from asyncspec.backend.base import Tensors, WireTensor
from asyncspec.dipsd.decide import Decision, Planning, decide
from asyncspec.jobs import Job, Rows
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.framing import Frame
from asyncspec_protocol.ids import Rank, is_draft
from asyncspec_protocol.messages import (
    Cancel,
    Closed,
    Collect,
    Consult,
    Consulted,
    Events,
    Fault,
    Hello,
    Inspect,
    Message,
    Status,
    Submit,
    Welcome,
)

S = TypeVar("S")

_OURS = (
    *(Fault, Collect, Events, Inspect, Status, Consult, Consulted),
    *(Submit, Cancel, Hello, Welcome),
)
"""What a node's machine never hears of."""


class Shell(Protocol):
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


class Courier(Protocol):
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

    def consult(self, link: Link, message: Consult) -> None:
        """A client or a draft node asks what is planned."""

    def consulted(self, link: Link, message: Consulted) -> None:
        """The first stage has answered."""

    def gone(self, link: Link) -> None:
        """A link to a node or a client is gone."""


class Runtime(Generic[S]):
    """One node: a machine, its links, its device and its timers."""

    def __init__(
        self,
        machine: Machine[S],
        state: S,
        *,
        me: Hello,
        peers: Mapping[Rank, Address],
        sock: socket.socket,
        run_job: Callable[[Any], object | None],
        abandon_job: Callable[[Any], None],
        tensors: Tensors | None,
        shell: Shell,
        options: LinkOptions | None = None,
        security: Security | None = None,
    ) -> None:
        self.state = state
        self._machine = machine
        self._sock = sock
        self._run_job = run_job
        # Called on the event loop while a job may be running on the device's thread.
        self._abandon_job = abandon_job
        self._tensors = tensors
        self._shell = shell
        self._mesh = Mesh(me, peers, self, options or LinkOptions(), security or Security())
        self._tap: Tap | None = None
        self._courier: Courier | None = None
        self._inspector: Inspector | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._memo = Memo()
        self._inbox: deque[Input] = deque()
        # Links that hold messages; those with a tensor first.
        self._holding: deque[Link] = deque()
        self._busy = False

    async def run(self) -> None:
        """Serve until ``stop``. Raises what our own code did wrong, with the latest inputs."""
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._end: asyncio.Future[None] = loop.create_future()
        self._device = Device(self._run_job, self._ran, self._computed, self._device_failed)
        await self._mesh.start(self._sock)
        try:
            await self._end
        finally:
            for timer in self._timers.values():
                timer.cancel()
            await self._mesh.close("the node is stopping")
            await self._device.close()

    def stop(self) -> None:
        """Let ``run`` return."""
        if not self._end.done():
            self._end.set_result(None)

    @property
    def links(self) -> Mapping[Rank, Link]:
        """The nodes that are connected now."""
        return self._mesh.links

    @property
    def busy_seconds(self) -> float:
        """How long the device has worked so far."""
        return self._device.busy_seconds

    def answer_by(self, inspector: Inspector) -> None:
        """``inspector`` says from now on how this node is."""
        self._inspector = inspector

    def feed(self, event: Input) -> None:
        """Give the machine an input; call it on the event loop only.

        Inputs that come while another is being worked on wait for their turn.
        """
        self._inbox.append(event)
        if self._busy or self._end.done():
            return
        self._busy = True
        try:
            while True:
                if self._inbox:
                    self._step(self._inbox.popleft())
                elif not self._device.work():  # what it gives back goes to the inbox
                    break
        except Exception as error:
            error.add_note(f"the last inputs of this node, oldest first:\n{self._memo.story()}")
            if not self._end.done():
                self._end.set_exception(error)
        finally:
            self._busy = False
            self._flush()

    def record(self, tap: Tap | None, courier: Courier | None) -> None:
        """Tell ``tap`` from now on what happens here; ``courier`` answers whoever asks for it."""
        self._tap, self._courier = tap, courier
        for link in self._mesh.links.values():
            link.record(tap)

    def _step(self, event: Input) -> None:
        self._memo.keep(event)
        now = time.monotonic()
        try:
            self.state, effects = self._machine.step(self.state, event, now)
        except RemoteProtocolError as error:
            peer = error.peer
            if peer is None and isinstance(event, Received):
                peer = event.peer
            if peer is None:
                raise
            link = self._mesh.links.get(Rank(peer))
            if link is not None:  # else it is gone, and what it said is void
                link.refuse(Fault("protocol", error.text))
            if self._tap is not None:
                self._tap.stepped(event, (), (), now, time.monotonic(), error.text)
            return
        sizes = [self._perform(effect) for effect in effects]
        if self._tap is not None:
            self._tap.stepped(event, effects, sizes, now, time.monotonic())

    def _perform(self, effect: Effect) -> int:
        """Bytes written."""
        match effect:
            case Send(to, message, rows):
                return self._send(to, message, rows)
            case Compute(job):
                self._device.submit(job)
            case Abandon(job):
                self._abandon_job(job)
            case Emit():
                self._shell.emit(effect)
            case Finish(stats=stats, session=session):
                stats["bytes_sent"] = stats.get("bytes_sent", 0) + self._take_bytes(session)
                self._shell.finish(effect)
            case Report(to, session, passes, computed, dead, seconds):
                sent = self._take_bytes(session)
                account = Closed(session, self.rank, passes, computed, dead, seconds, sent)
                size = self._send(to, account)
                self._take_bytes(session)  # the account itself: the books of the session close
                return size
            case Arm(timer, at):
                self._arm(timer, at)
            case Plan(planning):
                self._plan(planning)
            case _:
                assert_never(effect)
        return 0

    @property
    def rank(self) -> Rank:
        """Who this node is."""
        return self._mesh.rank

    def _send(self, to: Rank, message: Message, rows: Rows | None = None) -> int:
        link = self._mesh.links.get(to)
        if link is None:
            return 0
        tensor = None
        if rows is not None:
            assert self._tensors is not None
            tensor = self._tensors.pack(rows)
            if link.packs:
                tensor = packed.pack(tensor)
        # Rows make another device work, so they go before words about the books.
        (self._holding.append if tensor is None else self._holding.appendleft)(link)
        return link.hold(message, tensor)

    def _flush(self) -> None:
        """Let the links write what was sent since the last time."""
        while self._holding:
            self._holding.popleft().flush()

    def _take_bytes(self, session: int) -> int:
        return sum(link.take_bytes(session) for link in self._mesh.links.values())

    def _arm(self, timer: str, at: float | None) -> None:
        if (old := self._timers.pop(timer, None)) is not None:
            old.cancel()
        if at is not None:
            # A machine's clock is finer than some event loops' own.
            delay = max(0.0, at - time.monotonic())
            self._timers[timer] = self._loop.call_later(delay, self._fire, timer)

    def _fire(self, timer: str) -> None:
        del self._timers[timer]
        self.feed(Fired(timer))

    # --- the device's side ----------------------------------------------------------------------

    def _ran(self, job: Job, at: float, until: float) -> None:
        if self._tap is not None:
            self._tap.ran(job, at, until)

    def _plan(self, planning: Planning) -> None:
        """On a thread of its own: the device works on meanwhile. Only one at a time is asked for,
        so there is nothing to queue."""
        future = self._loop.run_in_executor(None, decide, planning.deployment, planning.noise)
        future.add_done_callback(partial(self._planned, planning))

    def _planned(self, planning: Planning, future: asyncio.Future[Decision]) -> None:
        if self._end.done() or future.cancelled():
            return
        if (error := future.exception()) is not None:
            self._end.set_exception(error)
        else:
            self.feed(Planned(planning, future.result()))

    def _computed(self, job: Job, result: object, seconds: float) -> None:
        self.feed(Computed(job, result, seconds))

    def _device_failed(self, job: Job, error: BaseException) -> None:
        error.add_note(f"while the device ran {type(job).__name__}")
        if not self._end.done():
            self._end.set_exception(error)

    # --- the mesh's side ------------------------------------------------------------------------

    def joined(self, link: Link) -> None:
        """See ``Owner``."""
        if link.rank >= 0:
            link.record(self._tap)
            self._shell.changed(link.rank, True, "")
            self.feed(Joined(link.rank))
            if self._courier is not None:
                self._courier.joined(link)

    def lost(self, link: Link, reason: str) -> None:
        """See ``Owner``."""
        if self._courier is not None:
            self._courier.gone(link)
        if self._inspector is not None:
            self._inspector.gone(link)
        if link.rank < 0:
            self._shell.client_gone(link)
            return
        if is_draft(link.rank):
            for other in self._mesh.links.values():
                other.forget(link.rank)  # of its sessions no account will be asked for
        self._shell.changed(link.rank, False, reason)
        self.feed(Lost(link.rank, reason))

    def refused(self, rank: Rank, reason: str) -> None:
        """See ``Owner``."""
        self._shell.changed(rank, False, reason)

    def frame(self, link: Link, frame: Frame) -> None:
        """See ``Owner``."""
        message = frame.message
        if link.rank >= 0 and not isinstance(message, _OURS):
            handle = self._unpack(frame)
            seconds = 0.0 if frame.data is None else link.byte_seconds * frame.data.nbytes
            self.feed(Received(link.rank, message, handle, seconds))
        elif isinstance(message, Fault):
            link.close(message.text)
        elif isinstance(message, Collect | Events):
            self._trace(link, message, frame)
        elif isinstance(message, Inspect | Status | Consult | Consulted):
            self._inspect(link, message)
        elif link.rank < 0:
            if not isinstance(message, Submit | Cancel):
                raise RemoteProtocolError(f"a client may not send {type(message).__name__}")
            self._shell.client(link, message)
        else:
            raise RemoteProtocolError(f"a node may not send {type(message).__name__} here")

    def _trace(self, link: Link, message: Collect | Events, frame: Frame) -> None:
        """Traces are asked for by clients and by draft nodes, and given by stages."""
        if isinstance(message, Events) == link.asks:
            raise RemoteProtocolError(f"this peer may not send {type(message).__name__}")
        if isinstance(message, Events):
            if self._courier is not None:
                self._courier.events(link, message, frame)
        elif self._courier is not None:
            self._courier.collect(link, message)
        else:
            link.send(Events(message.collection, self.rank, True, "this node keeps no trace"))

    def _inspect(self, link: Link, message: Inspect | Status | Consult | Consulted) -> None:
        """Clients and draft nodes ask, the other nodes answer."""
        if isinstance(message, Status | Consulted) == link.asks:
            raise RemoteProtocolError(f"this peer may not send {type(message).__name__}")
        if self._inspector is None:
            raise RemoteProtocolError("this node does not say how it is")
        match message:
            case Inspect():
                self._inspector.inspect(link, message)
            case Status():
                self._inspector.status(link, message)
            case Consult():
                self._inspector.consult(link, message)
            case Consulted():
                self._inspector.consulted(link, message)

    def _unpack(self, frame: Frame) -> object | None:
        if frame.tensor is None or frame.data is None:
            return None
        if self._tensors is None:
            raise RemoteProtocolError("this node takes no tensors")
        wire = WireTensor(frame.tensor.dtype, frame.tensor.shape, frame.data)
        try:
            return self._tensors.unpack(packed.unpack(wire))
        except ValueError as error:
            raise RemoteProtocolError(str(error)) from error
