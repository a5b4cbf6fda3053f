"""The asyncio reader of effects: feeds inputs to one machine and performs its effects.

Law of this module: it decides nothing. What a node does is in its machine; each effect is handed to
its links, its device, its timers or the process around it.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, assert_never

from asyncspec.actor.device import ControlJobs, DeviceThread
from asyncspec.actor.link import Link, LinkOptions
from asyncspec.actor.mesh import PLAIN, Address, Mesh, Security
from asyncspec.actor.routing import Host, Incoming, LinkService, Outgoing
from asyncspec.actor.watchdog import FLOOR_SECONDS, DeviceWatchdog
from asyncspec.core import machine
from asyncspec.core.errors import ClusterError
from asyncspec.core.jobs import Batch, Forward, Job, TensorRows
from asyncspec.core.machine import (
    Computed,
    Effect,
    Input,
    Machine,
    PrefixStore,
    Received,
    Task,
    TimerFired,
    TraceHook,
)
from asyncspec.core.tensors import Tensors
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import Fault, Hello

KEPT_INPUTS = 40  # for the report of a crash


class InputLog:
    """Keeps the last inputs, without their tensors."""

    def __init__(self) -> None:
        self._recent: deque[object] = deque(maxlen=KEPT_INPUTS)

    def append(self, event: Input) -> None:
        """Keep an input. Called for every one, so it is described only in ``report``."""
        if isinstance(event, Received) and event.tensor is not None:
            self._recent.append(Received(event.peer, event.message))
        elif isinstance(event, Computed):
            session = getattr(event.job, "session", "several")
            self._recent.append((type(event.job).__name__, session, event.seconds))
        else:
            self._recent.append(event)

    def report(self) -> str:
        """The last inputs, oldest first, a line each."""
        return "\n".join(map(_describe, self._recent))


def _describe(event: object) -> str:
    """One line, without text or long lists."""
    match event:
        case Received(peer, message):
            names = [n for n in ("session", "segment", "version") if hasattr(message, n)]
            fields = " ".join(f"{name}={getattr(message, name)}" for name in names)
            return f"received {type(message).__name__} from rank {peer} {fields}"
        case (job, session, seconds):
            return f"computed {job} of session {session} in {seconds:.4f} s"
        case TimerFired(timer):
            return f"fired {timer}"
        case machine.LinkUp(peer):
            return f"link to rank {peer} up"
        case machine.LinkDown(peer, reason):
            return f"link to rank {peer} down: {reason}"
        case _:
            return type(event).__name__.lower()


class Timers:
    """Deadlines by name, on the running event loop; one that passes is an input."""

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
        """Cancel all of them."""
        for handle in self._handles.values():
            handle.cancel()

    def _fire(self, timer: str) -> None:
        del self._handles[timer]
        self._feed(TimerFired(timer))


class Runtime:
    """One node: a machine, its links, its device and its timers."""

    def __init__(
        self,
        machine: Machine[Any],
        state: Any,
        *,
        me: Hello,
        peers: Mapping[Rank, Address],
        sock: socket.socket,
        run_job: Callable[[Any], object | None],
        abandon_job: Callable[[Any], None],
        tensors: Tensors | None,
        host: Host,
        tasks: Mapping[str, Task],
        options: LinkOptions | None = None,
        security: Security = PLAIN,
        device_seconds: float = FLOOR_SECONDS,
        on_processor: bool = False,
        prefixes: PrefixStore | None = None,
    ) -> None:
        """``tasks``: by the names of ``RunTask``. ``device_seconds``: no job counts as hung sooner.
        ``abandon_job`` is called on the event loop while the device's thread may run the job, which
        computes there if ``on_processor``."""
        self.state = state
        self.rank = me.rank
        self._machine = machine
        self._sock = sock
        self._run_job = run_job
        self._abandon_job = abandon_job
        self._on_processor = on_processor
        self._host = host
        self._tasks = tasks
        self._prefixes = prefixes
        self._incoming = Incoming(self.feed, tensors, host, me)
        self._mesh = Mesh(me, peers, self._incoming, options or LinkOptions(), security)
        # The links to nodes that are up, and why handshakes with dialled nodes have failed.
        self.links: Mapping[Rank, Link] = self._mesh.links
        self.refusals: Mapping[Rank, str] = self._mesh.refusals
        self._outgoing = Outgoing(self.links, tensors)
        self._hook: TraceHook | None = None
        self._input_log = InputLog()
        self._inbox: deque[Input] = deque()
        # Results precede other inputs: the device may run the next job already.
        self._results: deque[Input] = deque()
        self._busy = False
        self._device: DeviceThread | None = None
        self._watchdog = DeviceWatchdog(device_seconds)
        self._control_jobs = ControlJobs(self._hold)
        # Forward passes of the device so far, and their rows.
        self.passes = 0
        self.rows = 0
        # The reason to end, once the device hangs.
        self._hung = ""

    async def run(self) -> None:
        """Serve until ``stop``. Raises errors of our own code, with the latest inputs as a note,
        and ``ClusterError`` where the device hangs, also while the node stops: then its thread is
        left behind."""
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._end: asyncio.Future[None] = loop.create_future()
        self._hurry = asyncio.Event()
        self._timers = Timers(self.feed)
        device = self._device = DeviceThread(
            self._run_job,
            self._ran,
            self._computed,
            self._device_failed,
            self._work,
            on_processor=self._on_processor,
        )
        await self._mesh.start(self._sock)
        watch = loop.create_task(self._watch(device))
        try:
            await self._end
        finally:
            self._timers.close()
            closing = loop.create_task(device.close())
            await self._mesh.close(self._hung or "the node is stopping")
            hurried = loop.create_task(self._hurry.wait())
            waits = (closing, watch, hurried)
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in waits:
                task.cancel()
        if self._hung and not self._hurry.is_set():
            raise ClusterError(self._hung)

    def stop(self) -> None:
        """Let ``run`` return once the running job is over; at once where it is called again."""
        if self._end.done():
            self._hurry.set()
        else:
            self._end.set_result(None)

    @property
    def busy_seconds(self) -> float:
        """Time that the device has worked; 0 before ``run``."""
        return 0.0 if self._device is None else self._device.busy_seconds

    @property
    def jobs(self) -> int:
        """Number of the device's unfinished jobs; 0 before ``run``."""
        return 0 if self._device is None else self._device.pending

    def add(self, service: LinkService) -> None:
        """``service`` handles its messages from now on."""
        self._incoming.add(service)

    def record(self, hook: TraceHook | None) -> None:
        """Report events to ``hook`` from now on; None: to none."""
        self._hook = hook
        self._mesh.record(hook)

    def check_certificates(self) -> None:
        """End links whose certificates do not allow them any more."""
        self._mesh.check_certificates()

    def feed(self, event: Input) -> None:
        """Give the machine an input, after the running step if any; on the event loop only."""
        self._inbox.append(event)
        self._work()

    def _work(self) -> None:
        """Handle results and inputs until none is left."""
        if self._busy or self._end.done():
            return
        self._busy = True
        try:
            while self._work_once():
                pass
        except Exception as error:
            error.add_note(f"last inputs of this node, oldest first:\n{self._input_log.report()}")
            self._fail(error)
        finally:
            self._busy = False
            self._outgoing.flush()

    def _work_once(self) -> bool:
        device = self._device
        assert device is not None
        with device.start_lock:
            if self._results:
                self._step(self._results.popleft())
            elif device.deliver():
                pass
            elif self._inbox:
                self._step(self._inbox.popleft())
            else:
                return False
        return True

    def _step(self, event: Input) -> None:
        self._input_log.append(event)
        now = time.monotonic()
        try:
            self.state, effects = self._machine.step(self.state, event, now)
        except RemoteProtocolError as error:
            peer = error.peer
            if peer is None and isinstance(event, Received):
                peer = event.peer
            if peer is None:
                raise
            if (link := self.links.get(Rank(peer))) is not None:
                link.refuse(Fault("protocol", error.text))
            if self._hook is not None:
                self._hook.stepped(event, (), (), now, time.monotonic(), error.text)
            return
        sizes = [self._perform(effect) for effect in effects]
        if self._hook is not None:
            self._hook.stepped(event, effects, sizes, now, time.monotonic())

    def _perform(self, effect: Effect) -> int:
        """Returns the bytes written."""
        device, outgoing = self._device, self._outgoing
        assert device is not None
        match effect:
            case machine.Send(to, message, rows):
                return outgoing.send(to, message, rows)
            case machine.Compute(job):
                device.submit(job)
                self._control_jobs.submitted(job)
            case machine.Abandon(job):
                self._abandon_job(job)
            case machine.RunNext(after, job):
                device.run_next(after, job)
            case machine.Emit(features=TensorRows() as rows):
                self._host.emit_features(effect, outgoing.pack(rows))
            case machine.Emit():
                self._host.emit(effect)
            case machine.Finish(stats=stats):
                sent = sum(map(outgoing.take_bytes, effect.sessions))
                stats["bytes_sent"] = stats.get("bytes_sent", 0) + sent
                self._host.finish(effect)
            case machine.SendClosed(to, session):
                closed = effect.message(self.rank, outgoing.take_bytes(session))
                size = outgoing.send(to, closed)
                outgoing.take_bytes(session)  # of the message itself
                return size
            case machine.SetTimer(timer, at):
                self._timers.set(timer, at)
            case machine.RunTask(task, argument):
                # On a thread of its own: neither the device nor the event loop waits for it.
                future = self._loop.run_in_executor(None, self._tasks[task], argument)
                future.add_done_callback(partial(self._task_done, effect))
            case machine.ReadPrefix() | machine.WritePrefix():
                assert self._prefixes is not None
                access = partial(machine.access_prefix, self._prefixes, effect)
                read = self._loop.run_in_executor(None, access)
                read.add_done_callback(self._prefix_done)
            case _:
                assert_never(effect)
        return 0

    async def _watch(self, device: DeviceThread) -> None:
        """Ends when the device hangs."""
        watchdog = self._watchdog
        while not self._hung:
            await asyncio.sleep(watchdog.check_seconds)
            self._hung = watchdog.check(device.running, time.monotonic())
        self._fail(ClusterError(self._hung))

    def _fail(self, error: BaseException) -> None:
        if not self._end.done():
            self._end.set_exception(error)

    def _ran(self, job: Job, at: float, until: float) -> None:
        self._watchdog.observe(job, until - at)
        self._control_jobs.finished(job)
        if isinstance(job, Batch | Forward):
            self.passes += 1
            self.rows += job.row_count
        if self._hook is not None:
            self._hook.ran(job, at, until)

    def _hold(self, draft: Rank, hold: bool) -> None:
        if (link := self.links.get(draft)) is not None:
            link.hold_reading(hold)

    def _computed(self, job: Job, result: object, seconds: float, waited: float) -> None:
        self._results.append(Computed(job, result, seconds, waited))

    def _device_failed(self, job: Job, error: BaseException) -> None:
        error.add_note(f"while the device ran {type(job).__name__}")
        self._fail(error)

    def _prefix_done(
        self, future: asyncio.Future[machine.PrefixRead | machine.PrefixWritten]
    ) -> None:
        if self._end.done() or future.cancelled():
            return
        if (error := future.exception()) is not None:
            error.add_note("while stored prompts were read or written")
            self._fail(error)
        else:
            self.feed(future.result())

    def _task_done(self, effect: machine.RunTask, future: asyncio.Future[object]) -> None:
        if self._end.done() or future.cancelled():
            return
        if (error := future.exception()) is not None:
            error.add_note(f"while task {effect.task} ran")
            self._fail(error)
        else:
            self.feed(machine.TaskDone(effect.task, effect.argument, future.result()))
