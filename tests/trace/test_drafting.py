"""A batch of trees in a trace: each of its sessions has its time, and it replays."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncspec.trace.records import Issued, Ran, Step
from asyncspec_nodes.plugins.viewer.analysis.build import build
from asyncspec_nodes.plugins.viewer.replay import replay
from cluster import Cluster, ask
from laws import SMALL, Shaken


def recorded(delays: list[int], policy: str, *, apart: bool) -> Cluster:
    cluster = Cluster(
        Shaken(delays), stages=2, policies=SMALL, max_sessions=4, record=True, apart=apart
    )
    for number in range(4):
        cluster.submit(ask(number, policy=policy, max_new_tokens=10))
    cluster.world.run()
    return cluster


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=20),
    st.sampled_from([name for name in sorted(SMALL) if SMALL[name].uses_draft]),
    st.booleans(),
)
def test_every_session_of_a_batch_has_its_span(delays: list[int], policy: str, apart: bool) -> None:
    cluster = recorded(delays, policy, apart=apart)
    trace = cluster.trace()
    assert all(node.difference is None for node in replay(trace.lines, SMALL))
    rank = cluster.config.source or 0
    steps = [line for line in trace.lines if isinstance(line, Step) and line.rank == rank]
    issued = [e for step in steps for e in step.effects if isinstance(e, Issued)]
    ran = {line.job: line for line in trace.lines if isinstance(line, Ran) and line.rank == rank}
    spans = [s for s in build(trace).spans if s.rank == rank and s.kind == "draft"]
    got = sorted((span.at, span.until, span.session, span.rows) for span in spans)
    want = sorted(
        (ran[job.job].at, ran[job.job].until, session, nodes)
        for job in issued
        if job.kind in ("expand", "drafting") and job.job in ran
        for session, _, nodes in job.parts or ((job.session, -1, job.rows),)
    )
    assert [entry[2:] for entry in got] == [entry[2:] for entry in want]
    for found, wanted in zip(got, want, strict=True):
        assert found[1] - found[0] == pytest.approx(wanted[1] - wanted[0])


def test_there_are_batches_and_their_parts_sum_up() -> None:
    trace = recorded([1, 3, 2], "flowspec", apart=False).trace()
    batches = [
        effect
        for line in trace.lines
        if isinstance(line, Step)
        for effect in line.effects
        if isinstance(effect, Issued) and effect.kind == "drafting"
    ]
    assert batches
    for batch in batches:
        assert (batch.session, batch.segment) == (-1, -1)
        assert batch.rows == sum(nodes for _, _, nodes in batch.parts)
        assert len({session for session, _, _ in batch.parts}) == len(batch.parts) > 1
