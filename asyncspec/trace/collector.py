"""Brings the lines of all nodes' recorders to whoever asks for them, over the cluster's own links.

A client asks the draft node, the draft node asks the stages and passes on what they answer. Law of
this file: serving comes first. Lines go out in small frames, now and then, and to a reader that
is too slow not at all: its recorder's oldest lines make room, and are counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from asyncspec.actor.link import Link
from asyncspec.actor.runtime import Runtime
from asyncspec.backend.base import WireTensor
from asyncspec.trace import records
from asyncspec.trace.recorder import Recorder
from asyncspec_protocol.framing import Frame
from asyncspec_protocol.ids import Rank, is_draft
from asyncspec_protocol.messages import Collect, Events

FLUSH_SECONDS = 0.2
LINES_PER_FRAME = 256
# A reader that leaves so many bytes unread gets nothing more for the time being.
MAX_UNSENT = 4 * 1024 * 1024
# Clocks: a burst when recording begins or a peer comes, then a steady pulse.
BURST, BURST_SECONDS, PULSE_SECONDS = 12, 0.02, 0.5


NOTHING_KEPT = (
    "nothing of the last seconds is kept there; set [trace] events in the cluster file, such as "
    "events = 100000, and start its nodes anew, or record what comes (--for S)"
)
"""To whoever asks for what has been where nobody recorded."""


class _Collection:
    """One reader of this node's lines."""

    def __init__(self, link: Link, number: int, next_line: int) -> None:
        self.link = link
        self.number = number
        self.next_line = next_line
        self.following = True
        self.announced = False
        # Draft node only: our number at the stages, and the stages that still have lines.
        self.inner = -1
        self.waiting: set[Rank] = set()
        # Lines of stages that this reader was too slow for.
        self.lost: Counter[Rank] = Counter()


class NodeTraceCollector:
    """One node's part in collecting traces. See ``TraceCollector`` in ``actor.inbound``."""

    def __init__(
        self, runtime: Runtime[Any], make: Callable[[bool], Recorder], *, always: bool
    ) -> None:
        """``make`` gives a fresh recorder, told whether it hears of the machine's first step;
        ``always``: record from now on, asked or not. Needs a running event loop."""
        self._runtime = runtime
        self._make = make
        self._always = always
        self._recorder: Recorder | None = None
        self._collections: list[_Collection] = []
        self._inner = 0
        self._flushing: asyncio.TimerHandle | None = None
        self._probing: asyncio.TimerHandle | None = None
        runtime.record(None, self)
        if always:
            self._attach()

    @property
    def recorder(self) -> Recorder | None:
        """What records now, if anything does."""
        return self._recorder

    def said(self, request: int, tokens: tuple[int, ...], text: str) -> None:
        """Text of an answer, if somebody records."""
        if self._recorder is not None:
            self._recorder.said(request, tokens, text)

    def close(self) -> None:
        """No more timers."""
        for timer in (self._flushing, self._probing):
            if timer is not None:
                timer.cancel()

    # --- recording ------------------------------------------------------------------------------

    def _attach(self) -> Recorder:
        if self._recorder is None:
            self._recorder = self._make(self._always)
            if not self._always:  # which is from before the first job on
                self._recorder.under_way(self._runtime.jobs)
            self._runtime.record(self._recorder, self)
            self._probe(BURST)
        return self._recorder

    def _detach(self) -> None:
        if self._always or self._collections:
            return
        self._recorder = None
        self._runtime.record(None, self)
        self.close()

    def _probe(self, burst: int) -> None:
        """Only the draft node asks: it has a link to everybody."""
        if self._probing is not None:
            self._probing.cancel()
        for link in self._stages.values():
            link.ask_clock()
        pause = BURST_SECONDS if burst else PULSE_SECONDS
        loop = asyncio.get_running_loop()
        self._probing = loop.call_later(pause, self._probe, max(0, burst - 1))

    @property
    def _stages(self) -> Mapping[Rank, Link]:
        links = self._runtime.links
        return links if is_draft(self._runtime.rank) else {}

    # --- the runtime's side ---------------------------------------------------------------------

    def joined(self, link: Link) -> None:
        """See ``TraceCollector``: a new peer is asked for its clock and its lines."""
        if self._recorder is None or not is_draft(self._runtime.rank):
            return
        self._probe(BURST)
        for collection in self._collections:
            if collection.following:
                collection.waiting.add(link.rank)
                link.send(Collect(collection.inner, last=-1, follow=True))

    def gone(self, link: Link) -> None:
        """See ``TraceCollector``."""
        for collection in [c for c in self._collections if c.link is link]:
            self._collections.remove(collection)
            self._tell_stages(Collect(collection.inner, last=0, follow=False, stop=True))
        for collection in list(self._collections):
            collection.waiting.discard(link.rank)
            self._finish(collection)
        self._detach()

    def collect(self, link: Link, message: Collect) -> None:
        """See ``TraceCollector``."""
        known = self._find(link, message.collection)
        if known is not None:
            if message.stop:
                self._stop(known)
            return
        if message.stop:
            return
        if message.last > 0 and self._recorder is None and is_draft(self._runtime.rank):
            link.send(Events(message.collection, self._runtime.rank, True, NOTHING_KEPT))
            return
        recorder = self._attach()
        collection = _Collection(link, message.collection, recorder.since(message.last))
        collection.inner, self._inner = self._inner, self._inner + 1
        self._collections.append(collection)
        collection.waiting = set(self._stages)
        self._tell_stages(Collect(collection.inner, message.last, follow=True))
        self._flush()
        if not message.follow:
            self._stop(collection)

    def events(self, link: Link, message: Events, frame: Frame) -> None:
        """See ``TraceCollector``: pass on a stage's lines."""
        for collection in list(self._collections):
            if collection.inner == message.collection:
                if frame.data is not None:
                    self._pass_on(collection, link.rank, frame.data)
                if message.done:
                    collection.waiting.discard(link.rank)
                    self._finish(collection)

    # --- delivery -------------------------------------------------------------------------------

    def _pass_on(self, collection: _Collection, rank: Rank, data: memoryview) -> None:
        if self._full(collection):
            collection.lost[rank] += bytes(data).count(b"\n")
            return
        if lost := collection.lost.pop(rank, 0):
            self._send(collection, [records.Dropped(rank, lost)])
        tensor = WireTensor("uint8", (data.nbytes,), data)
        collection.link.send(Events(collection.number, rank), tensor)

    def _find(self, link: Link, number: int) -> _Collection | None:
        same = (c for c in self._collections if c.link is link and c.number == number)
        return next(same, None)

    def _tell_stages(self, message: Collect) -> None:
        for link in self._stages.values():
            link.send(message)

    def _stop(self, collection: _Collection) -> None:
        if collection.following:
            collection.following = False
            self._tell_stages(Collect(collection.inner, last=0, follow=False, stop=True))
            self._finish(collection)

    def _finish(self, collection: _Collection) -> None:
        """End a collection once everything there is has been delivered."""
        if collection.following or collection.waiting:
            return
        if collection not in self._collections:
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
        recorder = self._recorder
        assert recorder is not None
        if not collection.announced:
            collection.announced = True
            self._send(collection, [recorder.node])
        while collection.next_line < recorder.end and (last or not self._full(collection)):
            lines, collection.next_line = recorder.read(collection.next_line, LINES_PER_FRAME)
            self._send(collection, lines)
        if last:
            lost = [records.Dropped(rank, lines) for rank, lines in collection.lost.items()]
            self._send(collection, [*lost, recorder.ended()])

    def _send(self, collection: _Collection, lines: list[records.Record]) -> None:
        data = bytearray(records.ENCODER.encode_lines(lines))
        tensor = WireTensor("uint8", (len(data),), memoryview(data))
        collection.link.send(Events(collection.number, self._runtime.rank), tensor)

    def _full(self, collection: _Collection) -> bool:
        return collection.link.unsent > MAX_UNSENT
