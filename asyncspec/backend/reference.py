"""The sequential decoder on real stages: same kernels, no speculation, one new row per pass.

This is what "lossless" is measured against: the same stages, on the same machine, in exact mode
give the same tokens with speculation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import cast

from asyncspec.backend.base import StageBackend
from asyncspec.core.jobs import Admit, Forward, Release, Row, TensorRows
from asyncspec.core.sampling import Sampling
from asyncspec_protocol.ids import SegmentId, SessionId

CHUNK = 64
"""Rows of a prompt per pass."""

_SESSION = SessionId(-1)


def decode(
    stages: Sequence[StageBackend],
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_tokens: Collection[int] = (),
    sampling: Sampling | None = None,
    until: Callable[[int], bool] = lambda token: False,
) -> list[int]:
    """New tokens after a prompt of at least one token. A stop token is part of the answer, and so
    is the one for which ``until``, which is told every new token, says that it is the last."""
    capacity = len(prompt_ids) + max_new_tokens
    for stage in stages:
        stage.run(Admit(_SESSION, capacity, sampling or Sampling(), len(prompt_ids)))
    try:
        new: list[int] = []
        known, fresh = 0, list(prompt_ids)
        while len(new) < max_new_tokens:
            token = read(stages, _SESSION, known, fresh)
            known += len(fresh)
            fresh = [token]
            new.append(token)
            if token in stop_tokens or until(token):
                break
        return new
    finally:
        for stage in stages:
            stage.run(Release(_SESSION))


def read(
    stages: Sequence[StageBackend], session: SessionId, known: int, tokens: Sequence[int]
) -> int:
    """Commit ``tokens`` from position ``known`` on, in chunks; the token that comes next."""
    drawn = 0
    for start in range(0, len(tokens), CHUNK):
        chunk = tokens[start : start + CHUNK]
        ends = start + len(chunk) == len(tokens)
        result = _pass(stages, session, known + start, chunk, judge=ends)
        if ends:
            (drawn,) = cast("tuple[int]", result)
    return drawn


def _pass(
    stages: Sequence[StageBackend],
    session: SessionId,
    committed: int,
    tokens: Sequence[int],
    *,
    judge: bool,
) -> object:
    slots = range(committed, committed + len(tokens))
    rows = tuple(Row(slot, slot, tuple(range(committed, slot + 1))) for slot in slots)
    result: object = None
    for i, stage in enumerate(stages):
        last = i == len(stages) - 1
        result = stage.run(
            Forward(
                session=session,
                segment=SegmentId(committed),
                committed=committed,
                rows=rows,
                tokens=tuple(tokens) if i == 0 or last else (),
                hidden=TensorRows(result, tuple(range(len(tokens)))) if i else None,
                sampled_rows=(len(tokens) - 1,) if last and judge else (),
            )
        )
    return result
