"""The parent of a node's process: when it starts the node again, and what it passes on."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec_nodes.node.supervisor import (
    MOST_PAUSE_SECONDS,
    PERIOD_SECONDS,
    SUPERVISES,
    RestartBudget,
)

linux = pytest.mark.skipif(not SUPERVISES, reason="nodes are forked on Linux only")


@given(st.integers(1, 5), st.lists(st.floats(0, 2 * PERIOD_SECONDS), max_size=30))
def test_new_starts_are_few_in_any_period(most: int, passed: list[float]) -> None:
    budget, now = RestartBudget(most), 0.0
    given_at: list[float] = []
    for seconds in passed:
        now += seconds
        recent = [at for at in given_at if now - at <= PERIOD_SECONDS]
        pause = budget.take(now)
        assert (pause is None) == (len(recent) >= most)
        if pause is not None:
            given_at.append(now)
            assert pause == (0.1 * 2 ** (len(recent) - 1) if recent else 0.0)


@given(st.lists(st.tuples(st.booleans(), st.floats(0, PERIOD_SECONDS / 4)), max_size=40))
def test_ends_with_a_request_in_hand_do_not_count_but_are_no_faster_and_faster(
    ends: list[tuple[bool, float]],
) -> None:
    """Whatever they are, the others are counted as without them."""
    budget, alone, now, beside = RestartBudget(3), RestartBudget(3), 0.0, list[float]()
    for in_hand, seconds in ends:
        now += seconds
        pause = budget.take(now, in_hand=in_hand)
        if not in_hand:
            assert pause == alone.take(now)
            continue
        earlier = sum(now - at <= PERIOD_SECONDS for at in beside)
        beside.append(now)
        assert pause == (min(MOST_PAUSE_SECONDS, 0.1 * 2 ** (earlier - 1)) if earlier else 0.0)


def test_a_node_that_ends_under_load_by_itself_is_started_a_bounded_number_of_times() -> None:
    budget, now, starts = RestartBudget(3), 0.0, 0
    while now < PERIOD_SECONDS:
        pause = budget.take(now, in_hand=True)
        assert pause is not None
        now, starts = now + pause, starts + 1
    assert starts <= 30


PROGRAM = """
import os, signal, sys
import structlog
from asyncspec_nodes.node.supervisor import Supervisor
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
crashes, last = int(sys.argv[1]), sys.argv[2]
supervisor = Supervisor(2, structlog.get_logger(), [], stopped_seconds=float(sys.argv[4]))

def node():
    if last == "early":
        os.kill(os.getpid(), signal.SIGKILL)
    if last == "wait":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    supervisor.serves()
    supervisor.in_hand(last == "4")
    print("serves", os.getpid(), flush=True)
    if last == "wait":
        signal.sigwait([signal.SIGTERM])
        print("told", flush=True)
        return 0
    if os.path.getsize(sys.argv[3]) < crashes:
        with open(sys.argv[3], "a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGSTOP if last == "3" else signal.SIGSEGV)
    return 0 if last == "4" else int(last)

sys.exit(supervisor.run(node))
"""


@contextmanager
def supervised(crashes: int, last: str, file: str) -> Iterator[subprocess.Popen[str]]:
    """A node that crashes so many times once it serves, and then ends with the code ``last``;
    "early": it dies before it serves, "wait": it waits for SIGTERM."""
    # One that is to go on may be held up between its two signals.
    stopped = "0.2" if last == "3" else "60"
    arguments = [sys.executable, "-c", PROGRAM, str(crashes), last, file, stopped]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@linux
@pytest.mark.parametrize(
    ("crashes", "last", "code", "starts"),
    [(0, "0", 0, 1), (2, "0", 0, 3), (0, "2", 2, 1), (1, "2", 2, 2), (9, "0", 1, 3)],
)
def test_a_crash_is_mended_some_times(
    crashes: int, last: str, code: int, starts: int, tmp_path: os.PathLike[str]
) -> None:
    file = os.path.join(tmp_path, "crashes")
    open(file, "w").close()
    with supervised(crashes, last, file) as process:
        out, log = process.communicate(timeout=240)
    assert (process.returncode, len(out.splitlines())) == (code, starts)
    assert log.count("the node is started again") == starts - 1
    assert ("after 2 new starts" in log) == (crashes > 2)
    assert ("killed by SIGSEGV" in log) == (crashes > 0)


@linux
def test_a_request_that_ends_the_node_does_not_stop_it_for_good(
    tmp_path: os.PathLike[str],
) -> None:
    file = os.path.join(tmp_path, "crashes")
    open(file, "w").close()
    with supervised(5, "4", file) as process:
        out, log = process.communicate(timeout=240)
    assert (process.returncode, len(out.splitlines())) == (0, 6)
    assert "new starts" not in log


@linux
def test_a_stopped_node_is_killed_and_started_again(tmp_path: os.PathLike[str]) -> None:
    file = os.path.join(tmp_path, "stops")
    open(file, "w").close()
    with supervised(1, "3", file) as process:
        out, log = process.communicate(timeout=240)
    assert (process.returncode, len(out.splitlines())) == (1, 3)
    assert "the node has been stopped" in log
    assert "killed by SIGKILL" in log


@linux
def test_a_node_that_goes_on_is_kept(tmp_path: os.PathLike[str]) -> None:
    with supervised(0, "wait", "/dev/null") as process:
        assert process.stdout is not None
        node = int(process.stdout.readline().split()[1])
        for signum in (signal.SIGSTOP, signal.SIGCONT):
            os.kill(node, signum)
        process.terminate()
        out, log = process.communicate(timeout=240)
    assert (process.returncode, out) == (0, "told\n")
    assert "killed" not in log


@linux
def test_a_node_that_never_served_is_not_started_again() -> None:
    with supervised(0, "early", "/dev/null") as process:
        _, log = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "it was killed by SIGKILL" in log
    assert "started again" not in log


@linux
def test_a_node_ends_with_its_parent() -> None:
    with supervised(0, "wait", "/dev/null") as process:
        assert process.stdout is not None
        node = int(process.stdout.readline().split()[1])
        ended = os.pidfd_open(node)
        os.kill(process.pid, signal.SIGKILL)
        assert select.select([ended], [], [], 240)[0]
        os.close(ended)
