"""A stage's pass in ``fast`` mode against the time that reading its weights takes.

Run by ``measure`` as a process of its own, which has a node's environment. It writes a line for
each step, and last what it has found.

One row through a large model is bound by memory: every weight is read once. What a plain loop of
matrix products over the same weights takes is the bound; the pass also normalises, attends, turns
positions and picks a token. torch's own products are at their best with float32, so for weights of
16 bits the bound is what it takes to read as many bytes of float32.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import torch
from msgspec import Struct

from asyncspec.core.errors import ClusterError
from asyncspec.core.jobs import Admit, Forward, Row
from asyncspec.core.sampling import Sampling
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec.plugins.hf.model.stage import load_stage
from asyncspec_nodes.node.cli import huge_page_environment
from asyncspec_protocol.ids import SegmentId, SessionId
from tools.bench.enlarge import Size, enlarge
from tools.bench.limits.progress import Tick

SIZE = Size(hidden=1024, feed_forward=8192, layers=8)
CONTEXT, REPEATS = 64, 15
SESSION = SessionId(1)
_WIDE = torch.float32


class Bound(Struct, frozen=True):
    """Medians, in seconds."""

    one_pass: float
    weights: float
    nbytes: int

    @property
    def share(self) -> float:
        """1: the pass takes no longer than reading its weights."""
        return self.weights / self.one_pass


def measure(source: Path, folder: Path, stored: torch.dtype, tick: Tick) -> Bound:
    """Enlarge ``source`` into ``folder``, its weights stored as they are to be, and time it in
    float32, interleaved with the loop. Raises ``ClusterError``."""
    nbytes = enlarge(source, folder, SIZE, stored)
    tick()
    command = [sys.executable, "-m", __name__, str(folder)]
    root = Path(__file__).resolve().parents[3]
    with subprocess.Popen(
        command, cwd=root, env=huge_page_environment(os.environ), stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        last = ""
        for line in child.stdout:
            last = line
            tick()
    if child.returncode:
        raise ClusterError(f"{__name__} has ended with code {child.returncode}")
    one_pass, weights = msgspec.json.decode(last, type=tuple[float, float])
    return Bound(one_pass, weights * stored.itemsize / _WIDE.itemsize, nbytes)


def main() -> None:
    """The process: seconds of a pass, and of a loop over the weights as float32."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    matrices = list(_matrices(folder))
    stage = load_stage(open_checkpoint(str(folder)), 0, SIZE.layers, dtype="fp32", mode="fast")
    stage.run(Admit(SESSION, CONTEXT + 2 * REPEATS, Sampling()))
    stage.run(_forward(0, CONTEXT))
    passes, loops = [], []
    with torch.inference_mode():
        for i in range(REPEATS):
            print(i, flush=True)
            passes.append(_seconds(lambda i=i: stage.run(_forward(CONTEXT + i, 1))))
            loops.append(_seconds(lambda: _loop(matrices)))
    medians = statistics.median(passes), statistics.median(loops)
    print(msgspec.json.encode(medians).decode())


def _matrices(folder: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    return [weight.to(_WIDE) for weight in weights.values() if weight.dim() == 2]


def _loop(matrices: list[torch.Tensor]) -> None:
    for matrix in matrices:
        torch.nn.functional.linear(torch.ones(1, matrix.shape[1]), matrix)


def _forward(start: int, rows: int) -> Forward:
    """The next tokens of a chain; the last one is verified."""
    return Forward(
        session=SESSION,
        segment=SegmentId(start),
        committed=start,
        rows=tuple(
            Row(start + i, start + i, tuple(range(start, start + i + 1))) for i in range(rows)
        ),
        tokens=tuple(3 + (start + i) % 500 for i in range(rows)),
        sampled_rows=(rows - 1,),
    )


def _seconds(call: object) -> float:
    assert callable(call)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
