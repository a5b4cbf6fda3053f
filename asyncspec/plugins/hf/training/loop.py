"""The training loop, the same for all kinds of heads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from asyncspec.backend.trainers import Progress
from asyncspec.plugins.hf.training.batches import ROWS, Texts
from asyncspec.plugins.hf.training.checkpoint import Checkpoint, Position, State
from asyncspec.plugins.hf.training.lesson import (
    Examination,
    Matrices,
    Measured,
    loss_of,
    mixed_precision,
)
from asyncspec.plugins.hf.training.optimizers import optimizers, rate_factor

SAVE_SECONDS = 60.0

PATIENCE = 5
"""Measurements without a better one, after which a training ends."""

CONTINUED = 0.5
"""Rates of a training that begins with the weights of an earlier one, beside those of a first."""

BETTER = 0.003
"""Guesses before the first wrong one, by which a measurement is better."""


@dataclass(frozen=True)
class Schedule:
    """What a head is trained on and for how long."""

    texts: Texts
    examination: Examination
    matrices: Matrices
    seed: int
    epochs: float
    # 0: no limit.
    minutes: float

    @property
    def steps(self) -> int:
        """At most so many."""
        return max(1, round(self.epochs * self.texts.tokens / (ROWS * self.texts.length)))

    @property
    def interval(self) -> int:
        """Steps from one measurement to the next."""
        return min(200, max(10, self.steps // 20))

    def done(self, position: Position) -> float:
        """The part that is done, 0 to 1."""
        parts = [position.step / self.steps]
        if self.minutes:
            parts.append(position.seconds / (60 * self.minutes))
        return min(1.0, max(parts))


def train(
    head: nn.Module, schedule: Schedule, checkpoint: Checkpoint, report: Callable[[Progress], None]
) -> tuple[Position, State]:
    """Train until the schedule is over or held-out agreement has stopped rising: where it ended and
    the best weights, which are at least as good as those that it begins with. What ``report``
    raises ends it after a save."""
    tuned = optimizers(head)
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in tuned]
    position, best = checkpoint.load(head, tuned)
    if position.earlier and not position.step:
        position.agreement, position.leading = schedule.examination.measure(head)  # type: ignore[arg-type]
        best = _weights(head)
    device = schedule.matrices.output.device
    began, saved = time.monotonic() - position.seconds, time.monotonic()
    mean = 0.0
    while not position.finished:
        batch = schedule.texts.batch(schedule.seed, position.step).to(device)
        factor = rate_factor(schedule.done(position)) * (CONTINUED if position.earlier else 1.0)
        head.zero_grad(set_to_none=True)
        with mixed_precision(device):
            loss = loss_of(head, batch, schedule.matrices)  # type: ignore[arg-type]
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer, rates in zip(tuned, peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = peak * factor
            optimizer.step()
        position.step += 1
        position.seconds = time.monotonic() - began
        value = float(loss.detach())
        mean = 0.95 * mean + 0.05 * value if mean else value
        done = schedule.done(position)
        measured = done >= 1.0 or position.step % schedule.interval == 0
        agreement, leading = Measured((), 0.0)
        if measured:
            agreement, leading = schedule.examination.measure(head)  # type: ignore[arg-type]
            best = _compare(position, best, head, agreement, leading)
            position.finished = done >= 1.0 or position.stale >= PATIENCE
        left = position.seconds * (1 - done) / done
        progress = Progress(position.step, schedule.steps, mean, left, agreement, leading)
        try:
            report(progress)
        except BaseException:
            checkpoint.save(position, head, tuned, best)
            raise
        if position.finished or time.monotonic() - saved > SAVE_SECONDS:
            checkpoint.save(position, head, tuned, best)
            saved = time.monotonic()
    return position, best


def _compare(
    position: Position,
    best: State,
    head: nn.Module,
    agreement: tuple[float, ...],
    leading: float,
) -> State:
    """The best weights, now that the head's have been measured; notes it in ``position``."""
    position.stale += 1
    if leading > position.reached + BETTER:
        position.stale = 0
    position.reached = max(position.reached, leading)
    if leading <= position.leading:
        return best
    position.leading, position.agreement = leading, agreement
    return _weights(head)


def _weights(head: nn.Module) -> State:
    return {name: tensor.detach().cpu().clone() for name, tensor in head.state_dict().items()}
