"""Run in a process of its own: loads one stage and prints what memory it took, as JSON."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import psutil
import torch

from asyncspec.backend.hf.checkpoint import open_checkpoint
from asyncspec.backend.hf.stage import load_stage
from asyncspec.jobs import Admit, Forward, Release, Row, Rows
from asyncspec.sampling import Sampling
from asyncspec_protocol.ids import SegmentId, SessionId

MIB = 1 << 20


def peak() -> float:
    """Highest resident memory of this process so far, MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise OSError("no VmHWM in /proc/self/status")


def now() -> float:
    """Resident memory of this process, MiB."""
    return float(psutil.Process().memory_info().rss) / MIB


def main(small: str, large: str, first: int, last: int, capacity: int) -> dict[str, float]:
    """Sizes in MiB."""
    torch.set_num_threads(1)
    # What importing torch and transformers costs, whatever the model.
    load_stage(open_checkpoint(small), 0, 1)
    base = now()
    read_before = _bytes_read()
    stage = load_stage(open_checkpoint(large), first, last)
    loaded, loading_peak = now(), peak()
    session = SessionId(1)
    stage.run(Admit(session, capacity, Sampling()))
    hidden = torch.zeros(64, stage.shard.facts.hidden_size, dtype=stage.shard.dtype)
    for start in range(0, capacity, 64):
        rows = tuple(Row(i, i, tuple(range(start, i + 1))) for i in range(start, start + 64))
        embeds = stage.shard.embeds
        stage.run(
            Forward(
                session,
                SegmentId(start),
                start,
                rows,
                tokens=(1,) * 64 if embeds else (),
                hidden=None if embeds else Rows(hidden, tuple(range(64))),
                judge=(63,) if stage.shard.judges else (),
            )
        )
    running_peak, full = peak(), now()
    stage.run(Release(session))
    ctypes.CDLL(None).malloc_trim(0)
    return {
        "base": base,
        "loaded": loaded,
        "loading_peak": loading_peak,
        "running_peak": running_peak,
        "full": full,
        "released": now(),
        "cache": stage.cache_bytes(capacity) / MIB,
        "read": (_bytes_read() - read_before) / MIB,
    }


def _bytes_read() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1])
    raise OSError("no rchar in /proc/self/io")


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]))))  # noqa: T201
