"""Whatever fails, and between whichever two effects: every answer is the sequential decoder's.

Schedules (``fault_schedules.py``) that are always the same: ``make test`` runs 250 of them, ``make
check`` 500, ``make nightly`` 1,000, and ``python tools/schedules`` ten thousand others. One that
fails there prints the small schedule it was reduced to, which belongs into ``schedules.jsonl``.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from msgspec.structs import replace

import fault_schedules
from asyncspec_nodes.roles.draft import recovery
from asyncspec_nodes.roles.draft.session import QueuedRequest
from cluster import ask
from effort import NIGHTLY
from fault_schedules import Ask, Schedule, decoded, drawn, encoded, failure, run, shrunk
from fault_world import Fault

KEPT = (Path(__file__).parent / "schedules.jsonl").read_text().splitlines()
BLOCK = 50
KINDS = {"kill", "cut", "stop", "slow", "lag", "cancel", "end"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", range(0, 1000 if NIGHTLY else 500, BLOCK))
def test_every_law_holds_whatever_fails(first: int) -> None:
    struck: Counter[str] = Counter()
    for seed in range(first, first + BLOCK):
        try:
            struck.update(run(drawn(seed)).world.struck)
        except Exception as error:
            if (
                Phase.shrink not in settings.default.phases
            ):  # tools/mutants: that it fails is enough
                raise
            raise AssertionError(fault_schedules.report(seed)) from error
    assert struck.keys() == KINDS  # else some law would say nothing


@pytest.mark.parametrize("line", KEPT)
def test_schedules_that_failed_once_do_so_no_more(line: str) -> None:
    run(decoded(line))


@pytest.mark.parametrize("at", range(0, 60, 3))
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_node_killed_before_any_effect_costs_no_other_request(rank: int, at: int) -> None:
    """The second request of a killed draft node comes when that is back."""
    asks = tuple(Ask(ask(n, max_new_tokens=6), when=40 * n) for n in range(2))
    schedule = Schedule(asks, (Fault("kill", rank, at),), stages=2, apart=True)
    running = run(schedule)
    assert running.world.struck["kill"] <= 1
    assert running.doomed <= ({0, 1} if rank == 0 else set())


def test_a_schedule_is_the_same_wherever_it_is_drawn_or_read() -> None:
    for seed in range(50):
        assert decoded(encoded(drawn(seed))) == drawn(seed)
    one = run(drawn(7))
    assert (one.world.now, one.world.steps) == (run(drawn(7)).world.now, one.world.steps)


@pytest.mark.slow
def test_a_failing_schedule_becomes_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a mistake: a token is given again after a restart."""
    requeued = recovery._requeued

    def one_forgotten(*args: Any, **named: Any) -> QueuedRequest:
        queued = requeued(*args, **named)
        return replace(queued, given=queued.given[:-1])

    monkeypatch.setattr(recovery, "_requeued", one_forgotten)
    found = next(schedule for schedule in map(drawn, range(100)) if failure(schedule))
    small = shrunk(found)
    assert len(small.asks) == len(small.faults) == 1
    assert small.asks[0].request.max_new_tokens <= 2
    assert isinstance(failure(decoded(encoded(small))), AssertionError)
