"""A recording replayed through the pure machines gives the same effects."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncspec.core import machine
from asyncspec.core.errors import UserError
from asyncspec.trace.records import NodeRecord, ReceivedMessage, Record, Step, Trace
from asyncspec_nodes.plugins.viewer.replay import replay
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.ids import Rank, draft_rank
from asyncspec_protocol.messages import Credit, Verdict
from cluster import Cluster, ask
from effort import examples
from laws import FEATURES, SMALL, Shaken
from reader import Reader


@settings(max_examples=examples(100, quick=20))
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=20),
    st.sampled_from(sorted(SMALL)),
    st.integers(1, 4),
    st.sampled_from(FEATURES),
    st.integers(1, 2),
)
def test_same_inputs_same_effects(
    delays: list[int], policy: str, stages: int, features: tuple[int, ...], drafts: int
) -> None:
    cluster = Cluster(
        Shaken(delays),
        stages=stages,
        drafts=drafts,
        policies=SMALL,
        record=True,
        features=features,
    )
    for number in range(2):
        cluster.submit(ask(number, policy=policy), draft_rank(number % drafts))
    cluster.world.run()
    found = replay(cluster.trace().lines, SMALL)
    assert [node.rank for node in found] == sorted({*cluster.drafts, *range(1, stages + 1)})
    assert sum(node.steps for node in found) == cluster.world.steps
    assert all(node.difference is None for node in found)


def recorded(**changes: object) -> Trace:
    cluster = Cluster(Shaken([1, 3, 2]), stages=2, policies=SMALL, record=True)
    cluster.submit(ask(max_new_tokens=8, **changes))
    cluster.world.run()
    return cluster.trace()


def steps_of(trace: Trace, rank: int) -> list[Step]:
    return [line for line in trace.lines if isinstance(line, Step) and line.rank == rank]


def test_a_stop_string_is_replayed() -> None:
    cluster = Cluster(Shaken([1, 3, 2]), stages=2, policies=SMALL, record=True)
    Reader(cluster, ask(), kept=5)
    cluster.submit(ask())
    cluster.world.run()
    trace = cluster.trace()
    assert any(isinstance(step.input, machine.Stopped) for step in steps_of(trace, 0))
    assert all(node.difference is None for node in replay(trace.lines, SMALL))


def test_another_machine_has_other_effects() -> None:
    trace = recorded()
    others = dict.fromkeys(SMALL, SMALL["autoregressive"])
    draft, *stages = replay(trace.lines, others)
    assert draft.difference is not None
    assert draft.difference.recorded != draft.difference.replayed
    assert all(stage.difference is None for stage in stages)


def test_a_changed_input_shows() -> None:
    lines = list(recorded().lines)
    at, step = next(
        (i, line)
        for i, line in enumerate(lines)
        if isinstance(line, Step)
        and isinstance(line.input, ReceivedMessage)
        and isinstance(line.input.message, Verdict)
    )
    message = msgspec.structs.replace(step.input.message, tokens=(1,) * len(step.input.message.ids))
    source = msgspec.structs.replace(step.input, message=message)
    lines[at] = msgspec.structs.replace(step, input=source)
    assert replay(lines, SMALL)[0].difference is not None


def test_a_refused_input_is_refused_again() -> None:
    cluster = Cluster(Shaken([1]), stages=1, policies=SMALL, record=True)
    recorder = cluster.recorders[Rank(1)]
    event = machine.Received(Rank(0), Credit(3))
    with pytest.raises(RemoteProtocolError) as refused:
        cluster.world.feed(Rank(1), event)
    recorder.stepped(event, (), (), 0.0, 0.0, refused.value.text)
    assert all(node.difference is None for node in replay(cluster.trace().lines, SMALL))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda node, steps: [node, *steps[1:]],
        lambda node, steps: [node, *steps[:2], *steps[3:]],
        lambda node, steps: [msgspec.structs.replace(node, whole=False), *steps],
    ],
)
def test_only_a_whole_recording_can_be_replayed(
    spoil: Callable[[NodeRecord, list[Step]], list[Record]],
) -> None:
    trace = recorded()
    node = next(line for line in trace.lines if isinstance(line, NodeRecord) and line.rank == 1)
    with pytest.raises(UserError, match="rank 1 was not recorded from its first step on"):
        replay(spoil(node, steps_of(trace, 1)), SMALL)


def test_settings_of_another_version_are_said() -> None:
    node = NodeRecord(1, 0.0, 0.0, "verify", 1, config={"rank": "first"}, whole=True)
    with pytest.raises(UserError, match="rank 1 was recorded with other settings"):
        replay([node])


def test_an_unknown_policy_is_reported() -> None:
    with pytest.raises(UserError, match="policy flowspec"):
        replay(recorded().lines, {"chunked": SMALL["chunked"]})
