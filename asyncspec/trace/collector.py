"""Delivers the trace lines of all nodes to clients, over the cluster's own links.

A client sends ``Collect`` to the draft node, which sends one to each stage and passes on what they
answer. Serving comes first: lines travel in small frames at intervals, and a reader that is too
slow loses lines, which are counted.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from asyncspec.actor.link import Link
from asyncspec.actor.routing import LinkService, Senders
from asyncspec.actor.runtime import Runtime
from asyncspec.backend.base import WireTensor
from asyncspec.trace import records
from asyncspec.trace.masking import Mask
from asyncspec.trace.recorder import Recorder
from asyncspec_protocol.ids import Rank, is_draft
from asyncspec_protocol.messages import Collect, Events

FLUSH_SECONDS = 0.2
"""Between frames to a reader: a page that follows a run looks live."""

LINES_PER_FRAME = 256
"""Encoding them takes about a millisecond of the event loop."""

MAX_UNSENT = 4 * 1024 * 1024
"""Bytes waiting on a reader's link above which it gets no more for the time being."""

MASK_BYTES = 16
"""Of a key that hides token ids."""

BURST, BURST_SECONDS, PULSE_SECONDS = 12, 0.02, 0.5
"""Clock probes: so many in a row when recording begins or a peer joins, then a steady pulse."""

OPERATORS_ONLY = (
    "this certificate does not allow it; make one for operators (make-keys.sh DIRECTORY "
    "NAME=operator)"
)
"""Answer to a request of a client that is no operator."""

NOTHING_KEPT = (
    "nothing of the last seconds is kept there; set [trace] events in the cluster file, such as "
    "events = 100000, and start its nodes anew, or record what comes (--for S)"
)
"""Answer to a request for the past where nothing was recorded."""


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
        self._collections: list[_Collection] = []
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
        if (known := next(same, None)) is not None or message.stop:
            if known is not None and message.stop:
                self._stop(known)
            return
        if not link.operator and not is_draft(link.rank):
            link.send(Events(message.collection, self._runtime.rank, True, OPERATORS_ONLY))
            return
        if message.last > 0 and self.recorder is None and is_draft(self._runtime.rank):
            link.send(Events(message.collection, self._runtime.rank, True, NOTHING_KEPT))
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
        self._flush()
        if not message.follow:
            self._stop(collection)

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
        """End a collection once all lines are delivered."""
        if collection.following or collection.waiting or collection not in self._collections:
            return
        self._deliver(collection, last=True)
        self._collections.remove(collection)
        collection.link.send(Events(collection.number, self._runtime.rank, done=True))
        self._detach()

    def _flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
        for collection in self._collections:
            self._deliver(collection)
        if self._collections:
            loop = asyncio.get_running_loop()
            self._flushing = loop.call_later(FLUSH_SECONDS, self._flush)

    def _deliver(self, collection: _Collection, *, last: bool = False) -> None:
        recorder = self.recorder
        assert recorder is not None
        if not collection.announced:
            collection.announced = True
            self._send(collection, [recorder.node])
        while collection.next_line < recorder.end and (last or not collection.full):
            lines, collection.next_line = recorder.read(collection.next_line, LINES_PER_FRAME)
            self._send(collection, lines)
        if last:
            lost = [records.Dropped(rank, lines) for rank, lines in collection.lost.items()]
            self._send(collection, [*lost, recorder.ended()])

    def _send(self, collection: _Collection, lines: list[records.Record]) -> None:
        if collection.mask is not None:
            lines = list(map(collection.mask.line, lines))
        collection.send(self._runtime.rank, records.ENCODER.encode_lines(lines))
