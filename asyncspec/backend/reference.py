"""The sequential decoder on real stages: same kernels, no speculation, one new row per pass. On the
same machine, in exact mode, stages give the same tokens with speculation ("lossless")."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import cast

from asyncspec.backend.base import StageBackend
from asyncspec.core.jobs import Admit, Forward, Release, Row, TensorRows
from asyncspec.core.sampling import Sampling
from asyncspec_protocol.ids import SegmentId, SessionId

CHUNK = 64
"""Rows of a prompt per pass."""

SESSION = SessionId(-1)
"""Session of passes that no request caused."""


def decode(
    stages: Sequence[StageBackend],
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_tokens: Collection[int] = (),
    sampling: Sampling | None = None,
    until: Callable[[int], bool] = lambda token: False,
) -> list[int]:
    """New tokens after a prompt of at least one token. The answer ends with, and includes, a stop
    token or the token for which ``until``, called with every new token, returns true."""
    capacity = len(prompt_ids) + max_new_tokens
    for stage in stages:
        stage.run(Admit(SESSION, capacity, sampling or Sampling(), len(prompt_ids)))
    try:
        new: list[int] = []
        length, fresh = 0, list(prompt_ids)
        while len(new) < max_new_tokens:
            token = read(stages, SESSION, length, fresh)
            length += len(fresh)
            fresh = [token]
            new.append(token)
            if token in stop_tokens or until(token):
                break
        return new
    finally:
        for stage in stages:
            stage.run(Release(SESSION))


def read(
    stages: Sequence[StageBackend], session: SessionId, position: int, tokens: Sequence[int]
) -> int:
    """Commit ``tokens`` from position ``position`` on, in chunks; the token that comes next."""
    result: object = None
    for start in range(0, len(tokens), CHUNK):
        chunk = tokens[start : start + CHUNK]
        ends = start + len(chunk) == len(tokens)
        for i, stage in enumerate(stages):
            sampled = (len(chunk) - 1,) if ends and i == len(stages) - 1 else ()
            hidden = _handed_on(stages[i - 1], stage, result, len(chunk)) if i else None
            result = stage.run(chain(session, position + start, chunk, hidden, sampled))
    (drawn,) = cast("tuple[int]", result)
    return drawn


def _handed_on(stage: StageBackend, successor: StageBackend, rows: object, count: int) -> object:
    """A stage's result as the next one takes it; their backends may differ."""
    if type(stage) is type(successor):
        return rows
    return successor.unpack(stage.pack(TensorRows(rows, tuple(range(count)))))


def chain(
    session: SessionId,
    committed: int,
    tokens: Sequence[int],
    hidden: object,
    sampled_rows: tuple[int, ...],
) -> Forward:
    """A pass over successive tokens from ``committed`` on. ``hidden``: a handle to their rows."""
    slots = range(committed, committed + len(tokens))
    return Forward(
        session=session,
        segment=SegmentId(committed),
        committed=committed,
        rows=tuple(Row(slot, slot, tuple(range(committed, slot + 1))) for slot in slots),
        tokens=tuple(tokens),
        hidden=None if hidden is None else TensorRows(hidden, tuple(range(len(tokens)))),
        sampled_rows=sampled_rows,
    )
