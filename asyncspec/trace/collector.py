"""Delivers the trace lines of all nodes to clients, over the cluster's own links.

A client sends ``Collect`` to the draft node, which sends one to each stage and passes on what they
answer. Serving comes first: lines travel in small frames at intervals, for a few milliseconds at a
time, and a reader that is too slow loses lines, which are counted.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from asyncspec.actor.link import Link
from asyncspec.actor.routing import LinkService, Senders
from asyncspec.actor.runtime import Runtime
from asyncspec.core.tensors import WireTensor
from asyncspec.trace import records
from asyncspec.trace.masking import Mask
from asyncspec.trace.recorder import Recorder
from asyncspec_protocol.ids import Rank, is_draft
from asyncspec_protocol.messages import Collect, Events

FLUSH_SECONDS = 0.2
"""Between frames to a reader: a page that follows a run looks live."""

SLICE_SECONDS = 5e-3
"""Seconds of delivering at a time, and until the next time where readers are behind."""

LINES_PER_FRAME = 256
"""Encoding them takes about a millisecond of the event loop."""

BYTES_PER_FRAME = 64 * 1024
"""Bytes of their MessagePack form: long lines take more time, above all to hide tokens."""

MAX_UNSENT = 4 * 1024 * 1024
"""Bytes waiting on a reader's link above which it gets no more for the time being."""

END_SECONDS = 5.0
"""For a reader that is too slow to get the lines before the end."""

MAX_COLLECTIONS, MAX_OWN = 16, 4
"""Collections of one draft node at a stage, and of all clients of a draft node; of one client."""

MASK_BYTES = 16
"""Bytes of a key that hides token ids."""

BURST, BURST_SECONDS, PULSE_SECONDS = 12, 0.02, 0.5
"""Clock probes: so many in a row when recording begins or a peer joins, then a steady pulse."""

OPERATORS_ONLY = (
    "this certificate does not allow it; make one for operators (asyncspec keys "
    "DIRECTORY NAME=operator)"
)
"""Answer to a request of a client that is no operator."""

NOTHING_KEPT = (
    "nothing of the last seconds is kept there; set [trace] events in the cluster file, such as "
    "events = 100000, and start its nodes anew, or record what comes (--for S)"
)
"""Answer to a request for the past where nothing was recorded."""

TOO_MANY = "there are too many recordings of this cluster already; end one of them"
"""Answer to a request beyond ``MAX_COLLECTIONS``."""

BROKEN = "this node has made a mistake, which its log describes"
"""End of a collection that cannot be delivered."""


@dataclass(eq=False)
class _Collection:
    """One reader of this node's lines."""

    link: Link
    number: int
    next_line: int
    # Hides token ids; None where they were asked for.
    mask: Mask | None
    key: str
    # Draft node only: the number of this collection at the stages, and the stages that still have
    # lines.
    inner: int
    waiting: set[Rank]
    # Until the reader stops it.
    following: bool = True
    # Then: the line behind its last one, and when a slow reader gets no more.
    end: int | None = None
    deadline: float = 0.0
    # The line that describes this node was sent.
    announced: bool = False
    # Lines of stages that this reader was too slow for.
    lost: Counter[Rank] = field(default_factory=Counter)

    def request(self, last: float) -> Collect:
        """What a stage is asked for."""
        return Collect(self.inner, last, follow=True, tokens=self.mask is None, mask=self.key)

    @property
    def full(self) -> bool:
        """Whether the reader is too slow."""
        return self.link.unsent > MAX_UNSENT

    def send(self, rank: Rank, data: bytes | bytearray | memoryview) -> None:
        tensor = WireTensor("uint8", (len(data),), memoryview(data))
        self.link.send(Events(self.number, rank), tensor)


class NodeTraceCollector(LinkService):
    """One node's part in collecting traces."""

    senders: ClassVar[Senders] = {Collect: ("client", "draft"), Events: ("verify", "source")}

    def __init__(self, runtime: Runtime, make: Callable[[bool], Recorder], *, always: bool) -> None:
        """``make`` returns a new recorder; its argument: whether from the machine's first step on.
        ``always``: record from now on, requested or not. Needs a running event loop."""
        self.recorder: Recorder | None = None
        self._runtime = runtime
        self._make = make
        self._always = always
        # The one that was served last is the last.
        self._collections: deque[_Collection] = deque()
        self._inner = 0
        self._flushing: asyncio.TimerHandle | None = None
        self._probing: asyncio.TimerHandle | None = None
        runtime.add(self)
        if always:
            self._attach()

    def text(self, request: int, tokens: tuple[int, ...], text: str) -> None:
        """Record the text of emitted tokens, while recording."""
        if self.recorder is not None:
            self.recorder.text(request, tokens, text)

    def close(self) -> None:
        for timer in (self._flushing, self._probing):
            if timer is not None:
                timer.cancel()

    def _attach(self) -> Recorder:
        if self.recorder is None:
            self.recorder = self._make(self._always)
            if not self._always:
                self.recorder.issued = self._runtime.jobs
            self._runtime.record(self.recorder)
            self._probe(BURST)
        return self.recorder

    def _detach(self) -> None:
        if not self._always and not self._collections:
            self.recorder = None
            self._runtime.record(None)
            self.close()

    def _probe(self, burst: int) -> None:
        """Probe the clocks; only the draft node has a link to every stage."""
        if self._probing is not None:
            self._probing.cancel()
        for link in self._stages.values():
            link.probe_clock()
        pause = BURST_SECONDS if burst else PULSE_SECONDS
        loop = asyncio.get_running_loop()
        self._probing = loop.call_later(pause, self._probe, max(0, burst - 1))

    @property
    def _stages(self) -> Mapping[Rank, Link]:
        return self._runtime.links if is_draft(self._runtime.rank) else {}

    def joined(self, link: Link) -> None:
        """Probe a new peer's clock, and request its lines."""
        if self.recorder is None or link.rank not in self._stages:
            return
        self._probe(BURST)
        for collection in self._collections:
            if collection.following:
                collection.waiting.add(link.rank)
                link.send(collection.request(-1.0))

    def lost(self, link: Link, reason: str) -> None:
        """End the collections of a lost link, and its part in those of others."""
        for collection in [c for c in self._collections if c.link is link]:
            self._collections.remove(collection)
            self._stop_stages(collection)
        for collection in list(self._collections):
            collection.waiting.discard(link.rank)
            self._finish(collection)
        self._detach()

    def received(self, link: Link, message: Any, data: memoryview | None) -> None:
        if isinstance(message, Collect):
            self._collect(link, message)
        else:
            self._events(link, message, data)

    def _collect(self, link: Link, message: Collect) -> None:
        """Begin or stop a collection."""
        same = (c for c in self._collections if (c.link, c.number) == (link, message.collection))
        if (running := next(same, None)) is not None or message.stop:
            if running is not None and message.stop:
                self._stop(running)
            return
        if not link.operator and not is_draft(link.rank):
            link.send(Events(message.collection, self._runtime.rank, True, OPERATORS_ONLY))
            return
        if message.last > 0 and self.recorder is None and is_draft(self._runtime.rank):
            link.send(Events(message.collection, self._runtime.rank, True, NOTHING_KEPT))
            return
        if self._is_full(link):
            link.send(Events(message.collection, self._runtime.rank, True, TOO_MANY))
            return
        start = self._attach().since(message.last)
        stages = set(self._stages)
        key = "" if message.tokens else message.mask or secrets.token_hex(MASK_BYTES)
        mask = Mask(key.encode()) if key else None
        collection = _Collection(link, message.collection, start, mask, key, self._inner, stages)
        self._inner += 1
        self._collections.append(collection)
        for stage in self._stages.values():
            stage.send(collection.request(message.last))
        self._flush_after(0.0)
        if not message.follow:
            self._stop(collection)

    def _is_full(self, link: Link) -> bool:
        """Whether the peer, or all clients together, have as many collections as they may."""
        links = [collection.link for collection in self._collections]
        if is_draft(link.rank):
            return links.count(link) >= MAX_COLLECTIONS
        return len(links) >= MAX_COLLECTIONS or links.count(link) >= MAX_OWN

    def _events(self, link: Link, message: Events, data: memoryview | None) -> None:
        for collection in [c for c in self._collections if c.inner == message.collection]:
            if data is not None:
                self._pass_on(collection, link.rank, data)
            if message.done:
                collection.waiting.discard(link.rank)
                self._finish(collection)

    def _pass_on(self, collection: _Collection, rank: Rank, data: memoryview) -> None:
        if collection.full:
            collection.lost[rank] += bytes(data).count(b"\n")
            return
        if lost := collection.lost.pop(rank, 0):
            self._send(collection, [records.Dropped(rank, lost)])
        collection.send(rank, data)

    def _stop_stages(self, collection: _Collection) -> None:
        for link in self._stages.values():
            link.send(Collect(collection.inner, last=0, follow=False, stop=True))

    def _stop(self, collection: _Collection) -> None:
        if collection.following:
            collection.following = False
            self._stop_stages(collection)
            self._finish(collection)

    def _finish(self, collection: _Collection) -> None:
        """Let a collection end once the lines up to now are delivered, of the stages too."""
        if not collection.following and not collection.waiting and collection.end is None:
            assert self.recorder is not None
            collection.end = self.recorder.end
            collection.deadline = time.monotonic() + END_SECONDS
            self._flush_after(0.0)

    def _flush_after(self, seconds: float) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
        self._flushing = asyncio.get_running_loop().call_later(seconds, self._flush)

    def _flush(self) -> None:
        """Deliver lines, to one reader after the other, until none are left or the time is up."""
        until, idle = time.monotonic() + SLICE_SECONDS, 0
        while idle < len(self._collections):
            collection = self._collections[0]
            self._collections.rotate(-1)
            idle = 0 if self._deliver(collection) else idle + 1
            if time.monotonic() >= until:
                break
        if self._collections:
            done = idle == len(self._collections)
            self._flush_after(FLUSH_SECONDS if done else SLICE_SECONDS)

    def _deliver(self, collection: _Collection) -> bool:
        """Send a frame, if there is one to send. A mistake of ours costs this collection alone."""
        try:
            return self._send_next(collection)
        except Exception as error:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a trace cannot be delivered", "exception": error}
            )
            self._stop_stages(collection)
            self._end(collection, BROKEN)
            return True

    def _send_next(self, collection: _Collection) -> bool:
        """Send some lines of this node, or the end; False where there is nothing to send yet."""
        recorder, start = self.recorder, collection.next_line
        assert recorder is not None
        if not collection.announced:
            collection.announced = True
            self._send(collection, [recorder.node])
        end = recorder.end if collection.end is None else collection.end
        if start < end and not collection.full:
            count = min(LINES_PER_FRAME, end - start)
            lines, collection.next_line = recorder.read(start, count, BYTES_PER_FRAME)
            self._send(collection, lines)
            return True
        if collection.end is None or (start < end and time.monotonic() < collection.deadline):
            return False
        if start < end:
            collection.lost[self._runtime.rank] += end - start
        lost = [records.Dropped(rank, lines) for rank, lines in collection.lost.items()]
        self._send(collection, [*lost, recorder.ended()])
        self._end(collection)
        return True

    def _end(self, collection: _Collection, reason: str = "") -> None:
        self._collections.remove(collection)
        collection.link.send(Events(collection.number, self._runtime.rank, True, reason))
        self._detach()

    def _send(self, collection: _Collection, lines: list[records.Record]) -> None:
        if collection.mask is not None:
            lines = list(map(collection.mask.line, lines))
        collection.send(self._runtime.rank, records.ENCODER.encode_lines(lines))
