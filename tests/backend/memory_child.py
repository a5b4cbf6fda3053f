"""Run in a process of its own: loads one stage and prints what memory it took, as JSON."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from asyncspec.backend.base import Quantize
from asyncspec.core.jobs import Admit, Forward, Release, Row, TensorRows
from asyncspec.core.sampling import Sampling
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec.plugins.hf.model.stage import HFStage, load_stage
from asyncspec_protocol.ids import SegmentId, SessionId

MIB = 1 << 20
SESSIONS = 6
"""Sessions at a time, after the first has ended."""
ROWS = 64
"""Of a pass."""


def peak() -> float:
    """Highest resident memory of this process so far, MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise OSError("no VmHWM in /proc/self/status")


def now() -> float:
    """Resident memory of this process, MiB."""
    return float(psutil.Process().memory_info().rss) / MIB


def imports(small: str) -> float:
    """What importing torch and transformers takes, whatever the model, MiB."""
    torch.set_num_threads(1)
    load_stage(open_checkpoint(small), 0, 1)
    return now()


def main(
    small: str,
    large: str,
    first: int,
    last: int,
    capacity: int,
    quantize: Quantize,
    sessions: int,
) -> dict[str, float]:
    """Sizes in MiB. ``sessions``: how many there are at a time in the end."""
    base = imports(small)
    read_before = _bytes_read()
    stage = load_stage(open_checkpoint(large), first, last, quantize=quantize)
    sizes = {
        "base": base,
        "read": (_bytes_read() - read_before) / MIB,
        "loaded": now(),
        "loading_peak": peak(),
        "cache": stage.cache_bytes(capacity) / MIB,
    }
    session = SessionId(0)
    stage.run(Admit(session, capacity, Sampling()))
    # The cache grows step by step; what is computed of other slots changes no size.
    for start in _starts(capacity):
        stage.run(_pass(stage, session, start))
    sizes |= {"running_peak": peak(), "full": now(), "held": _held(stage) / MIB}
    stage.run(Release(session))
    sizes["released"] = now()
    if not sessions:
        return sizes
    for i in range(sessions):
        stage.run(Admit(SessionId(i), capacity, Sampling()))
        stage.run(_pass(stage, SessionId(i), capacity - ROWS))
    sizes |= {"several": now(), "several_held": _held(stage) / MIB}
    # All but the last have ended: what lies in memory behind theirs is still in use.
    for i in range(sessions - 1):
        stage.run(Release(SessionId(i)))
    sizes["one_is_left"] = now()
    stage.run(Release(SessionId(sessions - 1)))
    assert _held(stage) == 0
    return sizes | {"several_released": now()}


def _starts(capacity: int) -> list[int]:
    """Committed tokens before some passes: none, then about twice as many each time, at last all
    that leave room for one pass."""
    starts = [0]
    while (start := 2 * starts[-1] + ROWS) < capacity - ROWS:
        starts.append(start)
    return [*starts, capacity - ROWS]


def _held(stage: HFStage) -> int:
    """Memory of the caches of all sessions, in bytes."""
    return sum(session.cache.bytes_held for session in stage._sessions.values())


def _pass(stage: HFStage, session: SessionId, start: int) -> Forward:
    """A chunk of ``ROWS`` rows at the end of ``start`` committed tokens."""
    rows = tuple(Row(i, i, tuple(range(start, i + 1))) for i in range(start, start + ROWS))
    hidden = torch.zeros(ROWS, stage.shard.info.hidden_size, dtype=stage.shard.dtype)
    embeds = stage.shard.has_embedding
    return Forward(
        session,
        SegmentId(start),
        start,
        rows,
        tokens=(1,) * ROWS if embeds else (),
        hidden=None if embeds else TensorRows(hidden, tuple(range(ROWS))),
        sampled_rows=(ROWS - 1,) if stage.shard.has_head else (),
    )


def _bytes_read() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1])
    raise OSError("no rchar in /proc/self/io")
