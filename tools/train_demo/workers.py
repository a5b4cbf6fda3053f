"""One or several data-parallel processes that average their gradients over gloo."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from .options import Options


@dataclass(frozen=True)
class Group:
    """This process among its fellows; rank 0 reports, saves and keeps the clock."""

    rank: int
    size: int

    @property
    def chief(self) -> bool:
        """Whether this process reports and saves."""
        return self.rank == 0

    def sum_(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` by its sum over all workers."""
        if self.size > 1:
            dist.all_reduce(tensor)


Work = Callable[["Options", Group], None]


def run_workers(work: Work, options: Options) -> None:
    """Call `work` in `options.workers` processes, rank 0 in this one.

    Each has one torch thread: several processes keep full speed on a busy machine, several
    threads do not. With a GPU there is one process, whatever was asked for.
    """
    torch.set_num_threads(1)
    if options.workers == 1 or torch.cuda.is_available():
        work(options, Group(0, 1))
        return
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        others = [
            context.Process(target=_member, args=(work, options, rank, meeting), daemon=True)
            for rank in range(1, options.workers)
        ]
        for process in others:
            process.start()
        try:
            _member(work, options, 0, meeting)
            for process in others:
                process.join(timeout=60)
        finally:
            for process in others:
                process.kill()


def _member(work: Work, options: Options, rank: int, meeting: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=options.workers
    )
    try:
        work(options, Group(rank, options.workers))
    finally:
        dist.destroy_process_group()
