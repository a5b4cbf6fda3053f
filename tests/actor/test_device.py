"""A device's jobs: in order and one at a time, on the thread and on the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncspec.actor.device import Device
from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.cost_model.short_jobs import ShortJobs
from asyncspec.core.jobs import Compact, Job, Release
from asyncspec_protocol.errors import LocalProtocolError
from asyncspec_protocol.ids import SessionId

SHORT, LONG = PARAMETERS.short_job_seconds / 2, PARAMETERS.short_job_seconds * 2


def job(number: int) -> Job:
    return Release(SessionId(number))


@given(st.lists(st.booleans(), max_size=400))
def test_each_time_a_job_is_longer_than_expected_takes_twice_the_proof(longs: list[bool]) -> None:
    short, in_a_row, wrong = ShortJobs(), 0, 0
    for number, long in enumerate(longs):
        expected = short.expects(job(number))
        assert expected == (in_a_row >= PARAMETERS.short_job_proof * 2**wrong)
        short.observe(job(number), LONG if long else SHORT)
        in_a_row = 0 if long else in_a_row + 1
        wrong += expected and long


def test_a_kind_gets_another_chance_at_last() -> None:
    short = ShortJobs()
    for _ in range(20):
        for _ in range(PARAMETERS.max_short_job_proof):
            short.observe(job(0), SHORT)
        assert short.expects(job(0))
        short.observe(job(0), LONG)
        assert not short.expects(job(0))


def test_sizes_are_told_apart() -> None:
    short = ShortJobs()
    for _ in range(PARAMETERS.short_job_proof):
        short.observe(Compact(SessionId(0), 0, (1, 2)), SHORT)
    assert short.expects(Compact(SessionId(1), 7, (4, 5, 6)))
    assert not short.expects(Compact(SessionId(0), 0, (1, 2, 3, 4)))
    assert not short.expects(job(0))


class Log:
    """A device whose jobs take as long as they are told, and what it has told us."""

    def __init__(self, lengths: Sequence[float]) -> None:
        self.lengths = lengths
        self.threads: list[str] = []
        self.told: list[tuple[str, int]] = []
        self.failed: list[BaseException] = []
        self.end = asyncio.Event()
        self._busy = threading.Lock()
        self.device = Device(self._run, self._ran, self._done, self._failed, self._wake)

    def _wake(self) -> None:
        while self.device.deliver():
            pass

    def _run(self, some: Job) -> object | None:
        assert self._busy.acquire(blocking=False), "two jobs at a time"
        until = time.monotonic() + self.lengths[some.session]
        self.threads.append(threading.current_thread().name)
        while time.monotonic() < until:
            pass
        self._busy.release()
        if self.lengths[some.session] < 0:
            raise OSError("broken")
        return some.session + 1 if some.session % 3 else None

    def _ran(self, some: Job, at: float, until: float) -> None:
        assert at <= until
        self.told.append(("ran", some.session))
        if some.session + 1 == len(self.lengths):
            self.end.set()

    def _done(self, some: Job, result: object, seconds: float) -> None:
        assert result == some.session + 1
        self.told.append(("done", some.session))

    def _failed(self, some: Job, error: BaseException) -> None:
        self.failed.append(error)
        self.end.set()


def on_a_device(lengths: Sequence[float], act: Callable[[Log], Any]) -> Log:
    """Let ``act`` use a device; all of its jobs are waited for."""

    async def main() -> Log:
        log = Log(lengths)
        await act(log)
        await asyncio.wait_for(log.end.wait(), 30)
        while log.device.work():
            pass
        await log.device.close()
        return log

    return asyncio.run(main())


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.0, 0.0, LONG]), st.booleans()), min_size=1))
def test_jobs_are_told_in_the_order_of_submit(jobs: list[tuple[float, bool]]) -> None:
    lengths = [0.0] * PARAMETERS.short_job_proof + [length for length, _ in jobs]

    async def act(log: Log) -> None:
        pauses = [True] * PARAMETERS.short_job_proof + [pause for _, pause in jobs]
        for number, pause in enumerate(pauses):
            log.device.submit(job(number))
            if pause:
                while log.device.work():
                    pass
                await asyncio.sleep(0)
        while log.device.work():
            pass

    log = on_a_device(lengths, act)
    ran = [number for what, number in log.told if what == "ran"]
    assert ran == list(range(len(lengths)))
    assert [n for what, n in log.told if what == "done"] == [n for n in ran if n % 3]


def test_short_jobs_stay_on_the_event_loop_and_long_ones_do_not() -> None:
    async def act(log: Log) -> None:
        # Other processes may make any job long once in a while.
        for number in range(len(log.lengths)):
            log.device.submit(job(number))
            here = log.device.work()
            while log.told[-1:] != [("ran", number)] and ("done", number) not in log.told:
                assert not here
                await asyncio.sleep(0)

    here = "MainThread"
    threads = on_a_device([0.0] * 400, act).threads
    assert threads[: PARAMETERS.short_job_proof] == ["device"] * PARAMETERS.short_job_proof
    assert threads.count(here) > 100
    assert here not in on_a_device([LONG] * 50, act).threads


@pytest.mark.parametrize("before", [0, 50])
def test_a_job_that_raises_is_reported(before: int) -> None:
    async def act(log: Log) -> None:
        for number in range(before + 1):
            log.device.submit(job(number))
            while not log.failed and log.told[-1:] not in ([("ran", number)], [("done", number)]):
                if not log.device.work():
                    await asyncio.sleep(0)

    log = on_a_device([0.0] * before + [-1.0], act)
    assert isinstance(log.failed[0], OSError)
    assert len(log.failed) == 1


class Gated:
    """A device each of whose jobs waits until it is let go."""

    def __init__(self) -> None:
        self.begun: SimpleQueue[Job] = SimpleQueue()
        self.gates: dict[Job, threading.Event] = {}
        self.told: list[Job] = []
        self.device = Device(self._run, self._ran, self._done, self._failed, lambda: None)

    def submit(self, *jobs: Job) -> None:
        for some in jobs:
            self.gates.setdefault(some, threading.Event())
            with self.device.start_lock:
                self.device.submit(some)

    def run_next(self, after: Job, some: Job | None) -> None:
        if some is not None:
            self.gates.setdefault(some, threading.Event())
        with self.device.start_lock:
            self.device.run_next(after, some)

    def began(self) -> Job:
        return self.begun.get(timeout=30)

    def end(self, some: Job) -> None:
        self.gates[some].set()

    def deliver(self, until: Job) -> None:
        while until not in self.told:
            self.device.deliver()

    def _run(self, some: Job) -> object:
        self.begun.put(some)
        until = time.monotonic() + LONG  # so that none is run on the event loop
        assert self.gates[some].wait(30)
        while time.monotonic() < until:
            pass
        return some

    def _ran(self, some: Job, at: float, until: float) -> None:
        self.told.append(some)

    def _done(self, some: Job, result: object, seconds: float) -> None:
        assert result is some

    def _failed(self, some: Job, error: BaseException) -> None:
        raise error


def gated(act: Callable[[Gated], None]) -> None:
    async def main() -> None:
        some = Gated()
        act(some)
        await some.device.close()

    asyncio.run(main())


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=6))
@settings(max_examples=30)
def test_what_was_said_last_begins_by_itself_behind_what_was_submitted(
    passes: list[tuple[int, int]],
) -> None:
    def act(gate: Gated) -> None:
        fresh = map(job, count())
        order = [next(fresh)]
        gate.submit(order[0])
        for said, others in passes:
            running = gate.began()
            for number in range(said):
                coming = next(fresh)
                gate.run_next(running, coming)
                between = [next(fresh) for _ in range(others if number == 0 else 0)]
                gate.submit(*between)
                order += between
            if not said:
                gate.run_next(running, None)
                coming = next(fresh)
            gate.end(running)
            for some in order[order.index(running) + 1 :]:
                assert gate.began() is some
                gate.end(some)
            order.append(coming)
            if said:  # it is at work before anybody has heard of the end of the other
                assert running not in gate.told
            gate.deliver(running)
            gate.submit(coming)
        assert gate.began() is order[-1]
        gate.end(order[-1])
        gate.deliver(order[-1])
        assert gate.told == order
        assert gate.device.pending == 0

    gated(act)


def test_what_begins_by_itself_may_change_as_long_as_somebody_thinks() -> None:
    def act(gate: Gated) -> None:
        first, one, other = job(0), job(1), job(2)
        gate.submit(first)
        gate.run_next(gate.began(), one)
        gate.gates[other] = threading.Event()
        with gate.device.start_lock:
            gate.end(first)
            gate.device.run_next(first, other)
        assert gate.began() is other
        gate.end(other)
        gate.submit(other)
        gate.deliver(other)
        assert gate.told == [first, other]

    gated(act)


def test_what_was_said_too_late_is_submitted_as_usual() -> None:
    def act(gate: Gated) -> None:
        first, second = job(0), job(1)
        gate.submit(first)
        gate.began()
        gate.end(first)
        gate.deliver(first)
        gate.run_next(first, second)
        gate.submit(second)
        assert gate.began() is second
        gate.end(second)
        gate.deliver(second)
        assert gate.begun.empty()

    gated(act)


def test_only_the_announced_job_may_follow() -> None:
    def act(gate: Gated) -> None:
        first, second = job(0), job(1)
        gate.submit(first)
        gate.run_next(gate.began(), second)
        gate.end(first)
        assert gate.began() is second
        with pytest.raises(LocalProtocolError, match="other than the announced one"):
            gate.submit(job(2))
        gate.end(second)

    gated(act)
