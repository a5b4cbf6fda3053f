"""What a head learns from while it serves, and when a new version takes over. No torch."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.backend.learning import messages, rounds
from asyncspec.backend.learning.buffer import ExampleBuffer, is_held_out
from asyncspec.backend.learning.helper import RESTARTS, LearnerProcess
from asyncspec.backend.learning.messages import Example, InHand, Round, Score, Setup
from asyncspec.backend.learning.recorder import ANSWER, CONTEXT, SHORTEST, Recorder
from asyncspec.backend.learning.rounds import FEWEST, PATIENCE, STEPS, Rounds, is_better
from asyncspec.backend.learning.versions import KEPT, next_version, versions, write_version
from asyncspec.core.jobs import Feed, TensorRows
from asyncspec.core.tensors import WireTensor
from asyncspec_protocol.ids import SessionId, Version
from asyncspec_protocol.messages import Expand

COLUMNS = 3
ONE = SessionId(1)


def example(rows: int, group: int) -> Example:
    return Example((0,) * (rows + 1), 1, group, bytes(2 * COLUMNS * rows))


examples = st.builds(example, st.integers(1, 20), st.integers(0, 30))


@given(
    st.lists(st.tuples(examples, st.floats(0, 10)), max_size=40),
    st.integers(1, 60),
    st.floats(0.5, 30),
)
def test_memory_is_bounded_by_size_and_age(
    events: list[tuple[Example, float]], rows: int, seconds: float
) -> None:
    buffer, now = ExampleBuffer(2 * COLUMNS * rows, seconds), 0.0
    added: list[tuple[float, Example]] = []
    for new, later in events:
        now += later
        buffer.add(new, now)
        added.append((now, new))
        kept = [*buffer.training, *buffer.held_out]
        assert sum(one.rows for one in kept) <= rows
        assert len(kept) == len(buffer)
        young = [one for at, one in added if now - at < seconds]
        assert all(any(one is there for there in young) for one in kept)
    buffer.expire(now + 2 * seconds)
    assert len(buffer) == buffer.bytes == 0


@given(st.lists(examples))
def test_no_prompt_is_both_learned_from_and_measured_on(new: list[Example]) -> None:
    buffer = ExampleBuffer(1 << 30)
    for one in new:
        buffer.add(one, 0.0)
    trained = {one.group for one in buffer.training}
    assert trained.isdisjoint(one.group for one in buffer.held_out)
    assert len(buffer.training) + len(buffer.held_out) == len(new)


gains = st.lists(st.tuples(st.integers(1, 50), st.floats(0, 3), st.floats(0, 3)), max_size=30)


def scored(positions: int, leading: float) -> Score:
    return Score(positions, leading * positions, (positions,), (0,))


@given(gains)
def test_a_head_that_is_no_better_never_takes_over(pairs: list[tuple[int, float, float]]) -> None:
    before = [scored(count, old) for count, old, _ in pairs]
    after = [scored(count, new) for count, _, new in pairs]
    if is_better(before, after):
        assert rounds.leading(after) > rounds.leading(before) + rounds.BETTER
        assert not is_better(after, before)
    assert not is_better(before, before)


def test_noise_takes_nothing_over() -> None:
    """Of heads that are equally good, about one in 44 seems better."""
    rng, taken = np.random.default_rng(1), 0
    for _ in range(1000):
        old, new = rng.normal(1.0, 0.5, (2, 30))
        taken += is_better([scored(40, x) for x in old], [scored(40, x) for x in new])
    assert taken < 50
    better = [scored(40, x + 0.5) for x in rng.normal(1.0, 0.5, 30)]
    assert is_better([scored(40, 1.0)] * 30, better)


class FakeLearner:
    """A learner whose heads are numbers: how many tokens they guess in a row."""

    def __init__(self, gain: float) -> None:
        self.gain = gain
        self.training = self.drafting = self.proposed = 1.0
        self.versions: list[Path] = []
        self.measured = [0, 0]
        self.seen: set[int] = set()

    def step(self, examples: list[Example]) -> None:  # type: ignore[override]
        self.seen |= {one.group for one in examples}
        self.training += self.gain / STEPS

    def propose(self) -> None:
        self.proposed = self.training

    def measure(self, example: Example, *, proposed: bool) -> Score:
        assert example.group not in self.seen
        self.measured[proposed] += 1
        return scored(example.rows, self.proposed if proposed else self.drafting)

    def accept(self, folder: Path) -> None:
        self.versions.append(folder)
        self.drafting = self.proposed

    def revert(self) -> None:
        self.training = self.drafting


def full_buffer() -> ExampleBuffer:
    buffer = ExampleBuffer(1 << 30)
    for group in range(60):
        buffer.add(example(20, group), 0.0)
    return buffer


def run_rounds(work: Rounds, count: int) -> list[Round]:
    results: list[Round] = []
    while len(results) < count and work.has_work:
        if (result := work.advance()) is not None:
            results.append(result)
    return results


def test_a_better_head_is_written_and_drafts() -> None:
    learner = FakeLearner(0.5)
    work = Rounds(learner, full_buffer(), lambda: Path("next"))
    results = run_rounds(work, 3)
    assert [result.folder for result in results] == ["next"] * 3
    assert [round(result.trained, 6) for result in results] == [1.5, 2.0, 2.5]
    assert [round(result.drafting, 6) for result in results] == [1.0, 1.5, 2.0]
    assert results[0].held_out == 12


@pytest.mark.parametrize("gain", [0.0, 0.5])
def test_the_head_that_drafts_guesses_an_answer_once(gain: float) -> None:
    learner, buffer = FakeLearner(gain), full_buffer()
    work = Rounds(learner, buffer, lambda: Path("next"))
    run_rounds(work, 2)
    buffer.add(example(20, 65), 0.0)
    assert [result.held_out for result in run_rounds(work, 2)] == [13, 13]
    assert learner.measured == [13, 2 * 12 + 2 * 13]


@pytest.mark.parametrize("gain", [0.0, -0.1])
def test_a_head_that_does_not_improve_rests_until_there_are_new_answers(gain: float) -> None:
    learner, buffer = FakeLearner(gain), full_buffer()
    work = Rounds(learner, buffer, lambda: Path("next"))
    results = run_rounds(work, 100)
    assert len(results) == PATIENCE
    assert not any(result.folder for result in results)
    assert learner.training == learner.drafting == 1.0
    buffer.add(example(20, 61), 0.0)
    assert work.has_work


def test_few_answers_are_no_measure() -> None:
    buffer = ExampleBuffer(1 << 30)
    work = Rounds(FakeLearner(1.0), buffer, lambda: Path("next"))
    while sum(map(is_held_out, buffer.held_out)) < FEWEST:
        assert not work.has_work
        buffer.add(example(20, 5 * len(buffer)), 0.0)
    for group in range(FEWEST + 1):
        assert not work.has_work
        buffer.add(example(20, 5 * group + 1), 0.0)
    assert work.has_work


def pack(rows: TensorRows) -> WireTensor:
    """Handles are arrays of bfloat16's bits."""
    array = np.asarray(rows.handle)[list(rows.rows)]
    return WireTensor("bfloat16", array.shape, np.ascontiguousarray(array).data.cast("B"))


def feature_of(position: int) -> list[int]:
    return [position % 65536] * COLUMNS


class Node:
    """A recorder that hears of a session as from a draft node."""

    def __init__(self) -> None:
        self.examples: list[Example] = []
        self.recorder = Recorder(pack, self.examples.append)

    def tell(self, prompt: int, answer: int, step: int, tenant: str = "") -> None:
        fed, base, length = 0, 0, prompt + answer
        while base < length:
            count = min(step, length - base)
            if (new := base + count - 1 - fed) > 0:
                handle = np.array([feature_of(fed + i) for i in range(new)], np.uint16)
                rows = TensorRows(handle, tuple(range(new)))
                self.recorder.fed(Feed(ONE, fed, (rows,)))
                fed += new
            job = Expand(ONE, Version(0), base, tuple(range(base, base + count)), 0, 0, 0)
            if base == 0:
                job = replace(job, tenant=tenant, prompt_length=prompt)
            self.recorder.committed(job)
            base += count
        self.recorder.ended(ONE)


@given(st.integers(1, 700), st.integers(0, 1500), st.integers(1, 300))
def test_examples_are_the_ends_of_prompts_and_the_beginnings_of_answers(
    prompt: int, answer: int, step: int
) -> None:
    node = Node()
    node.tell(prompt, answer, step)
    rows = min(answer - 1, ANSWER)
    if rows < SHORTEST:
        assert not node.examples
        return
    (made,) = node.examples
    first = prompt - made.answer
    assert first >= 0
    assert 1 <= made.answer <= CONTEXT
    assert made.rows == made.answer + rows
    assert made.tokens == tuple(range(first, first + made.rows + 1))
    assert made.bits.tolist() == [feature_of(first + row) for row in range(made.rows)]


def test_answers_of_tenants_teach_nothing() -> None:
    node = Node()
    node.tell(10, 50, 7, tenant="somebody")
    assert not node.examples
    node.tell(10, 50, 7)
    assert len(node.examples) == 1


def test_a_version_appears_whole_and_few_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "head"
    assert versions(folder) == []

    def write(path: Path) -> None:
        assert not list(folder.glob("0*/new"))
        (path / "new").touch()

    for count in range(1, 5):
        path = next_version(folder)
        assert path.name == f"{count:05}"
        write_version(path, write)
        (path / "new").rename(path / "weights")
        assert len(versions(folder)) == min(count, KEPT)

    def fail(path: Path) -> None:
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        write_version(next_version(folder), fail)
    assert [path.name for path in folder.iterdir() if path.name.isdigit()]
    assert sorted(path.name for path in folder.iterdir()) == ["00003", "00004"]


def test_messages_travel() -> None:
    for message in (Setup("m:f", "t", "h", "f", 9), example(3, 7), InHand(True)):
        assert messages.decode_message(messages.encode(message)) == message
    result = Round(1, 2, 0.5, 1.0, math.pi, (0.5,), "f")
    assert messages.decode_round(messages.encode(result)) == result


@pytest.mark.slow
@pytest.mark.processes
def test_a_process_that_dies_again_and_again_is_given_up() -> None:
    codes: list[int] = []
    given_up = threading.Event()

    def off(code: int) -> None:
        codes.append(code)
        given_up.set()

    setup = Setup("builtins:int", "target", "head", "folder", 1000)
    starts: list[Setup] = []

    def start() -> Setup:
        starts.append(setup)
        return setup

    process = LearnerProcess(start, lambda result: None, off)
    process.add(example(3, 7))
    process.in_hand(False)
    assert given_up.wait(300)
    assert codes == [1]
    assert len(starts) == 1 + RESTARTS
    process.add(example(3, 7))  # nobody reads it, and nobody waits
    process.close()
