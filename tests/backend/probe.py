"""Looks at the logits a pipeline's last stage draws from, bit by bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import torch

from asyncspec.backend.base import KVType, Mode, Quantize
from asyncspec.backend.tree_stage import Session
from asyncspec.core.jobs import Forward
from asyncspec.plugins.hf.checkpoint.checkpoint import Checkpoint
from asyncspec.plugins.hf.kernels.cpu.capabilities import KernelSettings
from asyncspec.plugins.hf.kernels.device import CPU, Device
from asyncspec.plugins.hf.model.stage import HFStage, load_stage
from asyncspec.testing.pipeline import Walk, sequential


def cut(
    checkpoint: Checkpoint,
    stages: int,
    dtype: str = "float32",
    mode: Mode = "exact",
    settings: KernelSettings | None = None,
    quantize: Quantize = "none",
    device: Device = CPU,
    kv_type: KVType = "auto",
) -> list[HFStage]:
    """A whole model in ``stages`` stages of about the same depth."""
    layers = checkpoint.info.layers
    edges = [layers * i // stages for i in range(stages + 1)]
    return [
        load_stage(
            checkpoint,
            *(first, last),
            dtype=dtype,
            mode=mode,
            settings=settings,
            quantize=quantize,
            device=device,
            kv_type=kv_type,
        )
        for first, last in pairwise(edges)
    ]


class _Tap:
    """Stands between the last stage and its logits."""

    def __init__(self, stages: Sequence[HFStage]) -> None:
        self._shard = stages[-1].shard
        self._logits = self._shard.logits
        self._shard.logits = self._record  # type: ignore[method-assign]

    def stop(self) -> None:
        """Record no more."""
        self._shard.logits = self._logits  # type: ignore[method-assign]

    def _record(
        self, inputs: torch.Tensor, positions: torch.Tensor, tree: Any, rows: torch.Tensor
    ) -> torch.Tensor:
        raise NotImplementedError


class Everything:
    """Records the bits of all logits that stages sample from, by position, siblings' and the dead's
    included. Of any backend."""

    def __init__(self) -> None:
        self.seen: defaultdict[int, set[bytes]] = defaultdict(set)
        self._sample = sample = Session.sample

        def record(session: Session[Any], job: Forward, logits: Any, *rest: Any) -> Any:
            for row, values in zip(job.sampled_rows, logits, strict=True):
                bits = values.view(torch.uint8).numpy() if torch.is_tensor(values) else values
                self.seen[job.rows[row].position].add(bits.tobytes())
            return sample(session, job, logits, *rest)

        Session.sample = record  # type: ignore[method-assign,assignment]

    def stop(self) -> None:
        """Record no more."""
        Session.sample = self._sample  # type: ignore[method-assign]


class Probe(_Tap):
    """Records logits by position. In a walk, only those of the path's rows."""

    def __init__(self, stages: Sequence[HFStage]) -> None:
        super().__init__(stages)
        self._seen: dict[int, torch.Tensor] = {}
        self._rows: dict[int, int] | None = None

    def watch(self, rows: dict[int, int]) -> None:
        """Which rows of the next segment are of interest: position -> row."""
        self._rows = rows

    def take(self) -> dict[int, torch.Tensor]:
        """What was recorded since the last time."""
        seen, self._seen = self._seen, {}
        return seen

    def different(self, alone: dict[int, torch.Tensor]) -> list[int]:
        """Positions whose logits have other bits than those recorded alone."""
        seen = self.take()
        assert seen.keys() == alone.keys()
        return [p for p in sorted(alone) if not torch.equal(seen[p], alone[p])]

    def _record(
        self, inputs: torch.Tensor, positions: torch.Tensor, tree: Any, rows: torch.Tensor
    ) -> torch.Tensor:
        logits = self._logits(inputs, positions, tree, rows)
        found = dict(zip(rows.tolist(), logits, strict=True))
        wanted = self._rows
        if wanted is None:
            wanted = {int(positions[row]): row for row in found}
        self._seen |= {position: found[row].clone() for position, row in wanted.items()}
        return logits


def same_bits(stages: Sequence[HFStage], seed: str, widest: int = 16) -> None:
    """Asserts that a tree in segments of up to ``widest`` rows has the logits of one row after
    another, bit by bit."""
    assert [stage.guarantee for stage in stages] == ["bitwise"] * len(stages)
    random = Random(seed)
    tokens = [random.randrange(150) for _ in range(90)]
    probe = Probe(stages)
    drawn = sequential(stages, tokens, 50)
    alone = probe.take()
    walk = Walk(tokens, 50, 150, random, widest, watch=probe.watch)
    assert walk.run(stages) == drawn
    assert probe.different(alone) == []


def same_bits_in_child(
    paths: Sequence[Path], threads: int, dtype: str, **environment: str
) -> list[str]:
    """``same_bits`` of checkpoints in a process with an environment of its own; how the weights of
    each are kept."""
    child = Path(__file__).with_name("bits_child.py")
    done = subprocess.run(
        [sys.executable, str(child), str(threads), dtype, *map(str, paths)],
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()
