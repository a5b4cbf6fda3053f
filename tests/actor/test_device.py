"""A device's jobs: in order and one at a time, on its thread."""

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

from asyncspec.actor.device import DeviceThread
from asyncspec.core.jobs import Job, Release
from asyncspec_protocol.errors import LocalProtocolError
from asyncspec_protocol.ids import SessionId

LONG = 120e-6


def job(number: int) -> Job:
    return Release(SessionId(number))


class Log:
    """A device whose jobs take as long as they are told, and what it has told us."""

    def __init__(self, lengths: Sequence[float], *, on_processor: bool) -> None:
        self.lengths = lengths
        self.threads: list[str] = []
        self.reported: list[tuple[str, int]] = []
        self.failed: list[BaseException] = []
        self.end = asyncio.Event()
        self._busy = threading.Lock()
        self.device = DeviceThread(
            *(self._run, self._ran, self._done, self._failed, self._wake),
            on_processor=on_processor,
        )

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
        self.reported.append(("ran", some.session))
        if some.session + 1 == len(self.lengths):
            self.end.set()

    def _done(self, some: Job, result: object, seconds: float, waited: float) -> None:
        assert result == some.session + 1
        assert 0 <= waited <= seconds
        self.reported.append(("done", some.session))

    def _failed(self, some: Job, error: BaseException) -> None:
        self.failed.append(error)
        self.end.set()


def on_a_device(
    lengths: Sequence[float], act: Callable[[Log], Any], *, on_processor: bool = False
) -> Log:
    """Let ``act`` use a device; all of its jobs are waited for."""

    async def main() -> Log:
        log = Log(lengths, on_processor=on_processor)
        await act(log)
        log._wake()
        await asyncio.wait_for(log.end.wait(), 240)
        await log.device.close()
        return log

    return asyncio.run(main())


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.0, 0.0, LONG]), st.booleans()), min_size=1),
    st.booleans(),
)
def test_jobs_are_reported_in_the_order_of_submit(
    jobs: list[tuple[float, bool]], on_processor: bool
) -> None:
    async def act(log: Log) -> None:
        for number, (_, pause) in enumerate(jobs):
            log.device.submit(job(number))
            if pause:
                log._wake()
                await asyncio.sleep(0)

    log = on_a_device([length for length, _ in jobs], act, on_processor=on_processor)
    ran = [number for what, number in log.reported if what == "ran"]
    assert ran == list(range(len(jobs)))
    assert [n for what, n in log.reported if what == "done"] == [n for n in ran if n % 3]
    assert set(log.threads) == {"device"}


@pytest.mark.parametrize("before", [0, 50])
def test_a_job_that_raises_is_reported(before: int) -> None:
    async def act(log: Log) -> None:
        for number in range(before + 1):
            log.device.submit(job(number))

    log = on_a_device([0.0] * before + [-1.0], act)
    assert isinstance(log.failed[0], OSError)
    assert len(log.failed) == 1


class Gated:
    """A device each of whose jobs waits until it is let go."""

    def __init__(self) -> None:
        self.begun: SimpleQueue[Job] = SimpleQueue()
        self.gates: dict[Job, threading.Event] = {}
        self.reported: list[Job] = []
        self.waits: list[float] = []
        self.device = DeviceThread(
            *(self._run, self._ran, self._done, self._failed, lambda: None),
            on_processor=True,
        )

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
        return self.begun.get(timeout=240)

    def end(self, some: Job) -> None:
        self.gates[some].set()

    def deliver(self, until: Job) -> None:
        while until not in self.reported:
            self.device.deliver()

    def _run(self, some: Job) -> object:
        self.begun.put(some)
        assert self.gates[some].wait(240)
        return some

    def _ran(self, some: Job, at: float, until: float) -> None:
        self.reported.append(some)

    def _done(self, some: Job, result: object, seconds: float, waited: float) -> None:
        assert result is some
        assert 0 <= waited <= seconds
        self.waits.append(waited)

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
def test_the_last_announced_job_starts_behind_submitted_jobs(
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
                assert running not in gate.reported
            gate.deliver(running)
            gate.submit(coming)
        assert gate.began() is order[-1]
        gate.end(order[-1])
        gate.deliver(order[-1])
        assert gate.reported == order
        assert gate.device.pending == 0

    gated(act)


def test_what_a_job_does_not_compute_it_waits() -> None:
    def act(gate: Gated) -> None:
        gate.submit(job(0))
        gate.end(gate.began())
        gate.deliver(job(0))
        assert gate.waits[0] > 0

    gated(act)


def test_an_announced_job_may_be_replaced_while_the_start_lock_is_held() -> None:
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
        assert gate.reported == [first, other]

    gated(act)


def test_a_job_announced_after_the_end_of_the_one_before_is_submitted() -> None:
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
