"""Where measurements are made: in this process, or in several of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from asyncspec.backend.threads import set_thread_defaults
from tools.bench.pool import Result, Work, as_done
from tools.bench.report.cell import Ask, Cell, Stats
from tools.bench.report.models import Models
from tools.bench.report.real import measure_real
from tools.bench.report.virtual import VirtualEngine


class Job(Struct, frozen=True):
    """Cells measured in one go, and the answers they must give (on the virtual clock)."""

    cells: tuple[Cell, ...]
    answers: tuple[tuple[int, ...], ...] = ()
    # What the source has seen before.
    earlier: tuple[tuple[int, ...], ...] = ()


def write(models: Models, ask: Ask) -> tuple[int, ...]:
    """The target's answer, by the sequential decoder."""
    return _engine(models).target.write(ask)


def measure(models: Models, job: Job) -> list[Stats]:
    """The results of a job's cells, in their order."""
    if job.cells[0].setting.engine == "real":
        return measure_real(models, job.cells)
    engine = _engine(models)
    pairs = zip(job.cells, job.answers, strict=True)
    return [engine.measure(*pair, job.earlier) for pair in pairs]


@functools.cache
def _engine(models: Models) -> VirtualEngine:
    """One for each process: models are loaded once."""
    set_thread_defaults()  # before anything imports torch
    import torch

    torch.set_num_threads(1)
    return VirtualEngine(models)


def spread(
    jobs: int, do: Callable[[Models, Work], Result], models: Models, work: Sequence[Work]
) -> Iterator[tuple[Work, Result]]:
    """``do`` all of ``work``, in ``jobs`` processes; results as they come."""
    if jobs == 1 or len(work) < 2:
        for one in work:
            yield one, do(models, one)
        return
    yield from as_done(jobs, functools.partial(do, models), work)
