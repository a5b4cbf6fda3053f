"""Traces of a whole cluster, collected over its links."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from actor.local_cluster import QUICK, LocalCluster
from asyncspec.core.errors import ClusterError, UserError
from asyncspec.core.machine import Emit, Submitted
from asyncspec.trace import collector
from asyncspec.trace.collector import NodeTraceCollector
from asyncspec.trace.file import TraceWriter, read_trace
from asyncspec.trace.masking import Mask
from asyncspec.trace.records import (
    Dropped,
    End,
    Issued,
    JobResult,
    NodeRecord,
    Probe,
    Step,
    Trace,
)
from asyncspec_nodes.client.client import Client
from asyncspec_nodes.client.trace_download import TraceDownload
from asyncspec_nodes.plugins.viewer.analysis.build import build
from asyncspec_nodes.plugins.viewer.replay import replay
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import Collect, Events
from cluster import ask


async def client_of(cluster: LocalCluster) -> Client:
    host, port = cluster.ports[Rank(0)]
    return await Client.connect(host, port, "toy", options=QUICK)


def ranks(trace: Trace, kind: type) -> list[int]:
    return sorted(line.rank for line in trace.lines if isinstance(line, kind))


def emitted(trace: Trace) -> list[int]:
    steps = [line for line in trace.lines if isinstance(line, Step)]
    effects = [effect for step in steps for effect in step.effects]
    return [token for effect in effects if isinstance(effect, Emit) for token in effect.tokens]


@pytest.mark.asyncio
async def test_a_run_from_its_first_step_on(tmp_path: Path) -> None:
    async with LocalCluster(3, traced=True) as cluster:
        client = await client_of(cluster)
        writer = TraceWriter(tmp_path / "t")
        async with TraceDownload(client, writer, last=-1.0) as collector:
            await cluster.ask(ask())
        await client.close()
    trace = read_trace(tmp_path / "t")
    assert collector.complete
    assert collector.lines == len(trace.lines)
    assert ranks(trace, NodeRecord) == ranks(trace, End) == [0, 1, 2, 3]
    assert emitted(trace) == cluster.shells[0].tokens[0]
    assert [node.difference for node in replay(trace.lines)] == [None] * 4


@pytest.mark.asyncio
@pytest.mark.parametrize("policy", ["flowspec", "autoregressive"])
async def test_a_recording_without_tokens_is_analysed_like_one_with_them(
    tmp_path: Path, policy: str
) -> None:
    async with LocalCluster(2, traced=True) as cluster:
        client = await client_of(cluster)
        shown, hidden = TraceWriter(tmp_path / "shown"), TraceWriter(tmp_path / "hidden")
        async with (
            TraceDownload(client, shown, last=-1.0, tokens=True),
            TraceDownload(client, hidden, last=-1.0, tokens=False),
        ):
            await cluster.ask(ask(policy=policy))
        await client.close()
    open_trace, masked = read_trace(tmp_path / "shown"), read_trace(tmp_path / "hidden")
    useful = [
        [(one.session, one.segment, one.ids, one.useful) for one in build(trace).lifetimes]
        for trace in (open_trace, masked)
    ]
    assert useful[0] == useful[1]
    assert any(row[-1] for row in useful[0])
    given_out = emitted(open_trace)
    assert set(emitted(masked)) == {0}
    assert len(emitted(masked)) == len(given_out)
    inputs = [line.input for line in masked.lines if isinstance(line, Step)]
    prompts = [one.request.prompt for one in inputs if isinstance(one, Submitted)]
    assert prompts == [(0,) * len(ask().prompt)]
    with pytest.raises(UserError, match="--tokens"):
        replay(masked.lines)


@pytest.mark.asyncio
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that takes nothing")
async def test_a_disk_that_is_full_costs_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TraceWriter, "begin", lambda writer: None)  # full later, not at once
    async with LocalCluster(2, traced=True) as cluster:
        client = await client_of(cluster)
        with pytest.raises(UserError, match="cannot write the trace /dev/full: No space left"):
            async with TraceDownload(client, TraceWriter(Path("/dev/full")), last=-1.0):
                await cluster.ask(ask())
        assert not client.link.gone.done()
        await client.close()


@pytest.mark.asyncio
async def test_a_job_that_runs_when_recording_begins_has_no_cause(tmp_path: Path) -> None:
    """No job ends before it was issued, whatever a device has in hand at the first line."""
    async with LocalCluster(2, traced=False) as cluster:
        client = await client_of(cluster)
        asked = asyncio.create_task(cluster.ask(ask(max_new_tokens=20_000)))
        for number in range(5):
            writer = TraceWriter(tmp_path / f"{number}")
            async with TraceDownload(client, writer, last=0.0) as collector:
                while True:
                    await asyncio.sleep(0)
                    if collector.lines > 50:
                        break
        asked.cancel()
        await client.close()
    for number in range(5):
        trace = read_trace(tmp_path / f"{number}")
        ended, issued = ends(trace), issues(trace)
        assert all(issued[job] < end for job, end in ended.items() if job in issued)


def ends(trace: Trace) -> dict[tuple[int, int], int]:
    """The step of each node in which it heard of a job's end, by rank and job."""
    steps = [line for line in trace.lines if isinstance(line, Step)]
    return {(s.rank, s.input.job): s.number for s in steps if isinstance(s.input, JobResult)}


def issues(trace: Trace) -> dict[tuple[int, int], int]:
    """The step of each node that issued a job, by rank and job."""
    steps = [line for line in trace.lines if isinstance(line, Step)]
    return {(s.rank, e.job): s.number for s in steps for e in s.effects if isinstance(e, Issued)}


@pytest.mark.asyncio
async def test_clocks_are_compared(tmp_path: Path) -> None:
    async with LocalCluster(2, traced=True) as cluster:
        client = await client_of(cluster)
        async with TraceDownload(client, TraceWriter(tmp_path / "t"), last=-1.0):
            await cluster.ask(ask())
        await client.close()
    probes = [line for line in read_trace(tmp_path / "t").lines if isinstance(line, Probe)]
    assert {probe.peer for probe in probes} == {1, 2}
    # All of them are on one machine, so here the clocks are one.
    assert all(probe.asked <= probe.answered <= probe.came for probe in probes)


@pytest.mark.asyncio
async def test_nothing_is_recorded_unless_asked_for(tmp_path: Path) -> None:
    async with LocalCluster(2, traced=False) as cluster:
        first, second = await client_of(cluster), await client_of(cluster)
        await cluster.ask(ask(0))
        assert all(node.recorder is None for node in cluster.collectors.values())
        async with TraceDownload(first, TraceWriter(tmp_path / "1"), last=0.0):
            await cluster.ask(ask(1))
            async with TraceDownload(second, TraceWriter(tmp_path / "2"), last=0.0):
                await cluster.ask(ask(2))
        assert cluster.collectors[0].recorder is None
        for client in (first, second):
            await client.close()
    one, two = read_trace(tmp_path / "1"), read_trace(tmp_path / "2")
    tokens = cluster.shells[0].tokens
    assert emitted(one) == tokens[1] + tokens[2]
    assert emitted(two) == tokens[2]
    assert not any(line.whole for line in one.lines if isinstance(line, NodeRecord))


@pytest.mark.asyncio
async def test_the_last_seconds_of_a_flight_recorder(tmp_path: Path) -> None:
    async with LocalCluster(2, traced=True) as cluster:
        client = await client_of(cluster)
        await cluster.ask(ask())
        async with TraceDownload(client, TraceWriter(tmp_path / "t"), last=60.0):
            pass
        await client.close()
    assert emitted(read_trace(tmp_path / "t")) == cluster.shells[0].tokens[0]


@pytest.mark.asyncio
async def test_a_lost_stage_does_not_hold_up_the_end(tmp_path: Path) -> None:
    async with LocalCluster(2, traced=True) as cluster:
        client = await client_of(cluster)
        async with TraceDownload(client, TraceWriter(tmp_path / "t"), last=-1.0) as collector:
            await cluster.ask(ask())
            await cluster.stop(2)
        await client.close()
    assert collector.complete
    trace = read_trace(tmp_path / "t")
    assert {0, 1} <= set(ranks(trace, End)) <= {0, 1, 2}


@pytest.mark.asyncio
async def test_a_stage_that_comes_back_is_recorded_again(tmp_path: Path) -> None:
    async with LocalCluster(2, traced=True) as cluster:
        client = await client_of(cluster)
        async with TraceDownload(client, TraceWriter(tmp_path / "t"), last=-1.0):
            await cluster.ask(ask(0))
            await cluster.stop(2)
            cluster.start(2)
            await cluster.ask(ask(1))
        await client.close()
    assert ranks(read_trace(tmp_path / "t"), NodeRecord) == [0, 1, 2, 2]


@pytest.mark.asyncio
async def test_a_client_that_leaves_ends_its_collection(tmp_path: Path) -> None:
    async with LocalCluster(1, traced=False) as cluster:
        client = await client_of(cluster)
        client.collect(0.0, lambda events, data: None, tokens=True)
        await cluster.ask(ask(0))
        assert cluster.collectors[0].recorder is not None
        await client.close()
        await asyncio.wait_for(cluster.shells[0].gone.get(), 240)
        assert cluster.collectors[0].recorder is None


@pytest.mark.asyncio
async def test_what_a_slow_reader_misses_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = property(lambda some: some.link.rank < 0)
    monkeypatch.setattr(collector._Collection, "full", slow)
    monkeypatch.setattr(collector, "END_SECONDS", 0.0)
    async with LocalCluster(1, traced=True) as cluster:
        client = await client_of(cluster)
        async with TraceDownload(client, TraceWriter(tmp_path / "t"), last=-1.0):
            await cluster.ask(ask())
        await client.close()
    lines = read_trace(tmp_path / "t").lines
    missed = {line.rank: line.count for line in lines if isinstance(line, Dropped)}
    assert min(missed[0], missed[1]) > 10
    assert not ranks(read_trace(tmp_path / "t"), Step)


@pytest.mark.asyncio
async def test_a_long_past_is_delivered_slice_by_slice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop has other work meanwhile. Here a slice is over after one frame."""
    frames: list[int] = []  # of each slice
    flush, send = NodeTraceCollector._flush, NodeTraceCollector._send

    def flushing(one: NodeTraceCollector) -> None:
        frames.append(0)
        flush(one)

    def sending(one: NodeTraceCollector, *given: Any) -> None:
        frames[-1] += 1
        send(one, *given)

    monkeypatch.setattr(collector, "SLICE_SECONDS", 0.0)
    monkeypatch.setattr(collector, "LINES_PER_FRAME", 9)
    monkeypatch.setattr(NodeTraceCollector, "_flush", flushing)
    monkeypatch.setattr(NodeTraceCollector, "_send", sending)
    async with LocalCluster(2, traced=True) as cluster:
        client = await client_of(cluster)
        await cluster.ask(ask())
        async with TraceDownload(client, TraceWriter(tmp_path / "t"), last=-1.0) as download:
            pass
        await client.close()
    assert download.complete
    assert max(frames) <= 2  # the first one has the description of the node beside it
    trace = read_trace(tmp_path / "t")
    assert emitted(trace) == cluster.shells[0].tokens[0]
    assert [node.difference for node in replay(trace.lines)] == [None] * 3


@pytest.mark.asyncio
async def test_a_peer_has_a_few_recordings_at_a_time(tmp_path: Path) -> None:
    async with LocalCluster(1, traced=False) as cluster:
        client, other = await client_of(cluster), await client_of(cluster)
        ended: asyncio.Queue[str] = asyncio.Queue()

        def sink(events: Events, data: memoryview | None) -> None:
            if events.done:
                ended.put_nowait(events.reason)

        for _ in range(1000):
            client.collect(0.0, sink, tokens=True)
        for _ in range(1000 - collector.MAX_OWN):
            assert await ended.get() == collector.TOO_MANY
        for node in cluster.collectors.values():
            assert len(node._collections) <= collector.MAX_OWN
        async with TraceDownload(other, TraceWriter(tmp_path / "t"), last=0.0) as download:
            await cluster.ask(ask())
        assert download.complete
        await client.close()
        await other.close()
    assert emitted(read_trace(tmp_path / "t")) == cluster.shells[0].tokens[0]


@pytest.mark.asyncio
async def test_a_draft_node_has_a_bounded_number_of_recordings_at_a_stage() -> None:
    async with LocalCluster(1, traced=False) as cluster:
        await cluster.ask(ask())
        for number in range(100, 1100):
            cluster.nodes[0].links[Rank(1)].send(Collect(number, 0.0, follow=True))
        await cluster.ask(ask(1))  # behind them on the same link
        assert len(cluster.collectors[1]._collections) == collector.MAX_COLLECTIONS


@pytest.mark.asyncio
async def test_a_recording_that_cannot_be_delivered_is_no_other_ones_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake of ours; it stands in the log."""
    problems = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))

    def broken(self: Any, line: Any) -> Any:
        raise ArithmeticError("no such line")

    monkeypatch.setattr(Mask, "line", broken)
    async with LocalCluster(1, traced=False) as cluster:
        client = await client_of(cluster)
        async with TraceDownload(client, TraceWriter(tmp_path / "t"), last=0.0) as download:
            with pytest.raises(ClusterError, match=collector.BROKEN):
                async with TraceDownload(
                    client, TraceWriter(tmp_path / "masked"), last=0.0, tokens=False
                ):
                    await cluster.ask(ask())
        assert download.complete
        await client.close()
    assert emitted(read_trace(tmp_path / "t")) == cluster.shells[0].tokens[0]
    assert {type(context["exception"]) for context in problems} == {ArithmeticError}


@pytest.mark.asyncio
async def test_the_last_seconds_of_a_cluster_that_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"before")
    async with LocalCluster(1, traced=False) as cluster:
        client = await client_of(cluster)
        with pytest.raises(ClusterError, match=r"set \[trace\] events in the cluster file"):
            async with TraceDownload(client, TraceWriter(tmp_path / "t"), last=60.0):
                pass
        # What comes is recorded there as anywhere.
        async with TraceDownload(client, TraceWriter(tmp_path / "later"), last=0.0):
            await cluster.ask(ask())
        await client.close()
    assert (tmp_path / "t").read_bytes() == b"before"
    assert emitted(read_trace(tmp_path / "later")) == cluster.shells[0].tokens[0]


@pytest.mark.asyncio
async def test_a_node_without_a_collector_refuses() -> None:
    async with LocalCluster(1) as cluster:
        client = await client_of(cluster)
        client.collect(0.0, lambda events, data: None, tokens=True)
        assert "may not send Collect" in await client.link.gone
