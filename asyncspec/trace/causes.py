"""Why a step happened: the step that sent what it received, or that issued the job that ended.

Messages are matched by sender, receiver and checksum in the order of the link, so messages lost
with a link leave no wrong pairs. Pure.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from asyncspec.trace import records
from asyncspec.trace.log import Life, Log, LogRun, LogStep

_PACK = msgspec.msgpack.Encoder().encode
# Messages of a link that may be missing between two that are there.
_LOOK_AHEAD = 1024


class Cause(Struct, frozen=True):
    """The step before, and the job between them where there is one."""

    step: LogStep
    run: LogRun | None = None


Key = tuple[int, int]
"""A step: its life and its index."""


def causes(log: Log) -> Mapping[Key, Cause]:
    """The cause of every step that has one in the trace."""
    found: dict[Key, Cause] = {}
    sent = _sent(log)
    for life in log.lives:
        for step in life.steps:
            cause = _cause(life, step, sent)
            if cause is not None:
                found[step.life, step.index] = cause
    return found


Letters = dict[tuple[int, int], deque[tuple[int, LogStep]]]
"""By sender and receiver: checksum and sending step of every message, in order."""


def _sent(log: Log) -> Letters:
    letters: Letters = {}
    for life in log.lives:
        for step in life.steps:
            for effect in step.effects:
                if isinstance(effect, records.Sent) and effect.nbytes:
                    link = letters.setdefault((life.rank, effect.to), deque())
                    link.append((effect.check, step))
    return letters


def _cause(life: Life, step: LogStep, sent: Letters) -> Cause | None:
    match step.input:
        case records.Received(peer, message):
            sender = _take(sent.get((peer, life.rank)), zlib.crc32(_PACK(message)))
            return None if sender is None else Cause(sender)
        case records.Computed(job):
            index = life.issued.get(job)
            return None if index is None else Cause(life.steps[index], life.runs.get(job))
        case _:
            return None


def _take(link: deque[tuple[int, LogStep]] | None, check: int) -> LogStep | None:
    """The next message of a link with this checksum; those before it were lost."""
    for place, (found, step) in enumerate(link or ()):
        if place > _LOOK_AHEAD:
            return None
        if found == check:
            assert link is not None
            for _ in range(place + 1):
                link.popleft()
            return step
    return None
