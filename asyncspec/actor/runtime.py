"""A node's deadlines on the event loop's clock."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar, assert_never

from asyncspec.actor.device import Device
from asyncspec.actor.inbound import HostCallbacks, Incoming, Inspector, TraceCollector
from asyncspec.actor.input_log import InputLog
from asyncspec.actor.link import Link, LinkOptions
from asyncspec.actor.mesh import Address, Mesh, Security
from asyncspec.actor.watchdog import FLOOR_SECONDS, DeviceWatchdog
from asyncspec.backend import row_compression
from asyncspec.backend.base import Tensors
from asyncspec.core.errors import ClusterError
from asyncspec.core.jobs import Job, TensorRows
from asyncspec.core.machine import (
    Abandon,
    Compute,
    Computed,
    Effect,
    Emit,
    Finish,
    Input,
    Machine,
    Received,
    RunNext,
    RunTask,
    Send,
    SendClosed,
    SetTimer,
    Task,
    TaskDone,
    TimerFired,
)
from asyncspec.core.trace_hook import TraceHook
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import Closed, Fault, Hello, Message


class Timers:
    """Deadlines by name; one that comes is fed to the machine. Needs a running event loop."""

    def __init__(self, feed: Callable[[TimerFired], None]) -> None:
        self._feed = feed
        self._loop = asyncio.get_running_loop()
        self._handles: dict[str, asyncio.TimerHandle] = {}

    def set(self, timer: str, at: float | None) -> None:
        """Set a deadline (seconds of ``time.monotonic``) or, with None, cancel it."""
        if (old := self._handles.pop(timer, None)) is not None:
            old.cancel()
        if at is not None:
            # A machine's clock is finer than some event loops' own.
            delay = max(0.0, at - time.monotonic())
            self._handles[timer] = self._loop.call_later(delay, self._fire, timer)

    def close(self) -> None:
        """None of them comes any more."""
        for handle in self._handles.values():
            handle.cancel()

    def _fire(self, timer: str) -> None:
        del self._handles[timer]
        self._feed(TimerFired(timer))


# --- What a node sends: messages and rows to its links, held until a whole reaction is written.


class Outgoing:
    """Sends to the links that are up now; ``tensors`` makes bytes of rows."""

    def __init__(self, links: Mapping[Rank, Link], tensors: Tensors | None) -> None:
        self._links = links
        self._tensors = tensors
        # Links that hold messages; those with a tensor first.
        self._holding: deque[Link] = deque()

    def send(self, to: Rank, message: Message, rows: TensorRows | None = None) -> int:
        """Give a message to a link, which writes it at ``flush``. Its bytes: none if the link is
        down."""
        link = self._links.get(to)
        if link is None:
            return 0
        tensor = None
        if rows is not None:
            assert self._tensors is not None
            tensor = self._tensors.pack(rows)
            if link.packs:
                tensor = row_compression.pack(tensor)
        # Rows make another device work, so they go before words about the books.
        (self._holding.append if tensor is None else self._holding.appendleft)(link)
        return link.hold(message, tensor)

    def flush(self) -> None:
        """Let the links write what was sent since the last time."""
        while self._holding:
            self._holding.popleft().flush()


# --- The asyncio reader of effects: feeds inputs to one machine and performs what it asks for.
# Law of this file: it decides nothing. What a node does is in its machine; here are only its
# steps, and whom each effect is handed to: ``outgoing`` and ``mesh`` (its links), ``device``,
# ``timers``, ``host``. What comes over the links is fed to it by ``incoming``.

S = TypeVar("S")


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
        host: HostCallbacks,
        tasks: Mapping[str, Task],
        options: LinkOptions | None = None,
        security: Security | None = None,
        device_seconds: float = FLOOR_SECONDS,
    ) -> None:
        """``tasks``: what ``RunTask`` may name. ``device_seconds``: a job of the device may take so
        long at least, see ``watchdog``."""
        self.state = state
        self._machine = machine
        self._sock = sock
        self._run_job = run_job
        # Called on the event loop while a job may be running on the device's thread.
        self._abandon_job = abandon_job
        self._host = host
        self._tasks = tasks
        self._incoming = Incoming(me.rank, self.feed, tensors, host)
        self._mesh = Mesh(
            me, peers, self._incoming, options or LinkOptions(), security or Security()
        )
        self._outgoing = Outgoing(self._mesh.links, tensors)
        self._hook: TraceHook | None = None
        self._input_log = InputLog()
        self._inbox: deque[Input] = deque()
        # What the device has computed: it may have gone on by then, so this goes first.
        self._results: deque[Input] = deque()
        self._busy = False
        # True once there is a device to ask.
        self._started = False
        self._watchdog = DeviceWatchdog(device_seconds)
        # Why this node is given up, once its device hangs.
        self._hung = ""

    async def run(self) -> None:
        """Serve until ``stop``. Raises what our own code did wrong, with the latest inputs, and
        ``ClusterError`` where the device hangs: then its thread is left behind."""
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._end: asyncio.Future[None] = loop.create_future()
        self._timers = Timers(self.feed)
        self._device = Device(
            self._run_job, self._ran, self._computed, self._device_failed, self._work
        )
        self._started = True
        await self._mesh.start(self._sock)
        watch = loop.create_task(self._watch_device())
        try:
            await self._end
        finally:
            watch.cancel()
            self._timers.close()
            if self._hung:
                self._device.give_up()
            await self._mesh.close(self._hung or "the node is stopping")
            if not self._hung:
                await self._device.close()

    def stop(self) -> None:
        """Let ``run`` return."""
        if not self._end.done():
            self._end.set_result(None)

    @property
    def rank(self) -> Rank:
        """Who this node is."""
        return self._mesh.rank

    @property
    def links(self) -> Mapping[Rank, Link]:
        """The nodes that are connected now."""
        return self._mesh.links

    @property
    def refusals(self) -> Mapping[Rank, str]:
        """Why handshakes with nodes that this one dials have failed."""
        return self._mesh.refusals

    @property
    def books(self) -> Mapping[int, int]:
        """Bytes written for sessions that are not over."""
        return self._mesh.books

    @property
    def busy_seconds(self) -> float:
        """How long the device has worked so far; 0 before ``run``."""
        return self._device.busy_seconds if self._started else 0.0

    @property
    def jobs(self) -> int:
        """Jobs that the device has been given and has not finished; 0 before ``run``."""
        return self._device.under_way if self._started else 0

    def set_inspector(self, inspector: Inspector) -> None:
        """``inspector`` says from now on how this node is."""
        self._incoming.inspector = inspector

    def record(self, hook: TraceHook | None, collector: TraceCollector | None) -> None:
        """SendClosed to ``hook`` from now on; ``collector`` answers requests for the trace."""
        self._hook = hook
        self._mesh.record(hook)
        self._incoming.collector = collector

    def feed(self, event: Input) -> None:
        """Give the machine an input; call it on the event loop only.

        Inputs that come while another is being worked on wait for their turn.
        """
        self._inbox.append(event)
        self._work()

    def _work(self) -> None:
        """Until nothing is left to do."""
        if self._busy or self._end.done():
            return
        self._busy = True
        try:
            while self._one():
                pass
        except Exception as error:
            error.add_note(
                f"the last inputs of this node, oldest first:\n{self._input_log.story()}"
            )
            if not self._end.done():
                self._end.set_exception(error)
        finally:
            self._busy = False
            self._outgoing.flush()

    def _one(self) -> bool:
        """Do one thing, if there is one: a step, or what brings one."""
        device = self._device
        with device.start_lock:
            if self._results:
                self._step(self._results.popleft())
            elif not device.deliver():
                if not self._inbox:
                    return device.work()
                self._step(self._inbox.popleft())
        return True

    def _step(self, event: Input) -> None:
        self._input_log.keep(event)
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
            if self._hook is not None:
                self._hook.stepped(event, (), (), now, time.monotonic(), error.text)
            return
        sizes = [self._perform(effect) for effect in effects]
        if self._hook is not None:
            self._hook.stepped(event, effects, sizes, now, time.monotonic())

    def _perform(self, effect: Effect) -> int:
        """Bytes written."""
        match effect:
            case Send(to, message, rows):
                return self._outgoing.send(to, message, rows)
            case Compute(job):
                self._device.submit(job)
            case Abandon(job):
                self._abandon_job(job)
            case RunNext(after, job):
                self._device.run_next(after, job)
            case Emit():
                self._host.emit(effect)
            case Finish(stats=stats):
                sent = sum(map(self._mesh.take_bytes, effect.sessions))
                stats["bytes_sent"] = stats.get("bytes_sent", 0) + sent
                self._host.finish(effect)
            case SendClosed(to, session, passes, computed, dead, seconds, kept):
                sent = self._mesh.take_bytes(session)
                account = Closed(session, self.rank, passes, computed, dead, seconds, sent, kept)
                size = self._outgoing.send(to, account)
                self._mesh.take_bytes(session)  # the account itself: the books of the session close
                return size
            case SetTimer(timer, at):
                self._timers.set(timer, at)
            case RunTask():
                self._run_task(effect)
            case _:
                assert_never(effect)
        return 0

    async def _watch_device(self) -> None:
        watchdog = self._watchdog
        while not self._end.done():
            await asyncio.sleep(watchdog.check_seconds)
            self._hung = watchdog.check(self._device.service, time.monotonic())
            if self._hung and not self._end.done():
                self._end.set_exception(ClusterError(self._hung))

    # --- what comes back ------------------------------------------------------------------------

    def _ran(self, job: Job, at: float, until: float) -> None:
        self._watchdog.observe(job, until - at)
        if self._hook is not None:
            self._hook.ran(job, at, until)

    def _computed(self, job: Job, result: object, seconds: float) -> None:
        self._results.append(Computed(job, result, seconds))

    def _device_failed(self, job: Job, error: BaseException) -> None:
        error.add_note(f"while the device ran {type(job).__name__}")
        if not self._end.done():
            self._end.set_exception(error)

    def _run_task(self, effect: RunTask) -> None:
        """On a thread of its own: neither the device nor the event loop waits for it."""
        future = self._loop.run_in_executor(None, self._tasks[effect.task], effect.argument)
        future.add_done_callback(partial(self._task_done, effect))

    def _task_done(self, effect: RunTask, future: asyncio.Future[object]) -> None:
        if self._end.done() or future.cancelled():
            return
        if (error := future.exception()) is not None:
            error.add_note(f"while task {effect.task} ran")
            self._end.set_exception(error)
        else:
            self.feed(TaskDone(effect.task, effect.argument, future.result()))
