"""``asyncspec train-head`` on a running cluster: its answers and hidden states are the target's."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from asyncspec.backend.feature_shards import Collected, bfloat16_bits
from asyncspec.core.errors import ClusterError, UserError
from asyncspec.core.tensors import WireTensor
from asyncspec_nodes.client.client import ClusterAddress
from asyncspec_nodes.plugins.train_head.answers import Sample
from asyncspec_nodes.plugins.train_head.cluster import ClusterAnswers
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import FINAL, Cancel, Submit
from toy_service import ENDLESS, MODEL, RULES, ServingCluster, reference

DEPTHS = (0, 2)
TOKENS = 40
SAMPLES = [
    Sample(number, (1 + number, 5, 3, number), TOKENS, 0.8 * (number % 2), number)
    for number in range(8)
]


class Running:
    """A toy cluster of three stages on a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.cluster = ServingCluster(3, RULES)
        self.call(self.cluster.__aenter__)

    def call(self, function: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        async def called() -> Any:
            return await function(*arguments)

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result(240)

    def restart(self, rank: int) -> None:
        async def started() -> None:
            await self.cluster.stop(rank)
            self.cluster.start(rank)

        self.call(started)

    def answers(self, fingerprint: str = "toy") -> ClusterAnswers:
        host, port = self.cluster.ports[Rank(0)]
        address = ClusterAddress(host, port, "toy")
        return ClusterAnswers(address, fingerprint, 3, lambda line: None)

    def close(self) -> None:
        self.call(self.cluster.__aexit__)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(240)
        self._loop.close()


@pytest.fixture
def running() -> Iterator[Running]:
    cluster = Running()
    yield cluster
    cluster.close()


def expected(sample: Sample) -> tuple[tuple[int, ...], np.ndarray]:
    """Tokens that the target reads, and what it computes of them."""
    submit = Submit(
        *(0, "", sample.tokens, sample.seed, sample.temperature, 0, 1.0),
        prompt_ids=sample.prompt,
    )
    answer, _ = reference(submit)
    tokens = (*sample.prompt, *answer)[:-1]
    state, rows = MODEL.start(), b""
    for token in tokens:
        state = MODEL.extend(state, token)
        rows += MODEL.feature(state, (*DEPTHS, FINAL))
    shape = (len(tokens), len(DEPTHS) + 1)
    return tokens, bfloat16_bits(WireTensor("uint64", shape, memoryview(rows)))


def check(collected: Collected) -> None:
    tokens, features = expected(SAMPLES[collected.number])
    assert tuple(collected.tokens) == tokens
    assert collected.answer == len(SAMPLES[collected.number].prompt)
    np.testing.assert_array_equal(collected.features, features)


def ignore(*_: object) -> None:
    """What is not looked at."""


@pytest.mark.parametrize("lost", [None, 0, 2])
def test_answers_and_features_are_the_targets(running: Running, lost: int | None) -> None:
    """Also of those that go on after the loss of the draft node or a stage."""
    drawn: list[int] = []
    numbers: set[int] = set()
    for collected in running.answers()(DEPTHS, iter(SAMPLES), drawn.append, ignore):
        if lost is not None and not numbers:
            running.restart(lost)
        check(collected)
        numbers.add(collected.number)
    assert numbers == {sample.number for sample in SAMPLES}
    # The prompt has four tokens, and the last one drawn is not read.
    assert sum(drawn) == sum(len(expected(sample)[0]) - 3 for sample in SAMPLES)


def test_an_early_end_is_quiet(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    """As after Ctrl-C, with requests that are not done."""
    answers = running.answers()(DEPTHS, iter(SAMPLES), ignore, ignore)
    check(next(answers))
    answers.close()
    gc.collect()
    assert not caplog.records


def test_what_the_cluster_cannot_hold_is_left_out(running: Running) -> None:
    refused: list[Sample] = []
    long = Sample(100, (1,) * (2 * ENDLESS), 4, 0.0, 0)
    answers = running.answers()(DEPTHS, iter([long, SAMPLES[0]]), ignore, refused.append)
    (collected,) = answers
    check(collected)
    assert refused == [long]


def test_another_target_is_refused(running: Running) -> None:
    with pytest.raises(UserError, match=r"^the cluster at .* has another target than --target"):
        [*running.answers("another")(DEPTHS, iter(SAMPLES), ignore, ignore)]


def test_a_draft_node_of_an_older_version_is_refused_at_once(running: Running) -> None:
    """It skips the field ``Submit.features``, and answers without. Not at the end of the answer,
    which takes minutes of a large target."""
    service = running.cluster.engine._service
    submitted = service.client

    def older(client: Any, message: Submit | Cancel) -> None:
        fields = msgspec.to_builtins(message)
        if isinstance(message, Submit):
            assert fields.pop() == (*DEPTHS, FINAL)
        submitted(client, msgspec.convert(fields, type(message)))

    service.client = older  # type: ignore[method-assign]
    sample = max(SAMPLES, key=lambda sample: len(expected(sample)[0]))
    drawn: list[int] = []
    with pytest.raises(UserError, match=r"^the cluster sends no hidden states: .*older version"):
        [*running.answers()(DEPTHS, iter([sample]), drawn.append, ignore)]
    assert sum(drawn) < 3 < len(expected(sample)[0]) - len(sample.prompt)


def test_no_cluster_is_one_line() -> None:
    answers = ClusterAnswers(ClusterAddress("127.0.0.1", 1, ""), "", 3, ignore)
    with pytest.raises(ClusterError, match="cannot connect to the draft node"):
        [*answers(DEPTHS, iter(SAMPLES), ignore, ignore)]
