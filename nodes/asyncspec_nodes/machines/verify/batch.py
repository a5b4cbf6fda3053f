"""Which waiting segments share the next pass (dynamic batching, SpecPipe 4.4). Pure.

One segment of a session at most: its order is the order in which they came. Decoding goes before
prompts, because a user waits for every token of an answer and once for a prompt; but nothing is
passed over for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter

from msgspec.structs import replace

from asyncspec_nodes.machines.verify.session import StageSession, Waiting
from asyncspec_protocol.ids import SessionId

PATIENCE = 2
"""A segment that so many passes have gone without goes before all that came later."""

Queue = tuple[Waiting, ...]


def gather(
    queue: Queue, sessions: Mapping[SessionId, StageSession], most_rows: int
) -> tuple[Queue, Queue]:
    """What of a queue, which is not empty, goes in the next pass, and what is left of it. Only a
    segment alone may have more than ``most_rows`` rows."""
    if len(queue) == 1:
        return queue, ()
    heads: dict[SessionId, int] = {}
    for i, waiting in enumerate(queue):
        heads.setdefault(waiting.session, i)
    taken: set[int] = set()
    rows = 0
    for _, i in sorted((_urgency(queue[i], sessions), i) for i in heads.values()):
        count = len(queue[i].ids)
        if not taken or rows + count <= most_rows:
            taken.add(i)
            rows += count
    left = [
        replace(w, passed_over=w.passed_over + 1) if heads[w.session] == i else w
        for i, w in enumerate(queue)
        if i not in taken
    ]
    return itemgetter(*sorted(taken))(queue) if len(taken) > 1 else (queue[min(taken)],), tuple(
        left
    )


def _urgency(waiting: Waiting, sessions: Mapping[SessionId, StageSession]) -> int:
    """Smaller goes first; of equals, what came first."""
    if waiting.passed_over >= PATIENCE:
        return 0
    return 2 if prompt(waiting, sessions[waiting.session]) else 1


def prompt(waiting: Waiting, session: StageSession) -> bool:
    """True for a piece of a prompt, that with its last token included."""
    return waiting.ids[0] < session.liveness.prompt_length - 1
