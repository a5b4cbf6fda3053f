"""The same machines on real sockets, on asyncio's loop and on uvloop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, cast

import pytest
import uvloop

from actor.local_cluster import LocalCluster
from asyncspec.actor.link import Link
from asyncspec.core.errors import ClusterError
from asyncspec.core.jobs import Job
from asyncspec.core.machine import Cancelled
from asyncspec.core.reference import decode
from asyncspec.core.sampling import Sampling
from asyncspec.core.tensors import WireTensor
from asyncspec_protocol.ids import NodeId, Rank, SegmentId, SessionId, Version
from asyncspec_protocol.messages import FINAL, Verdict
from cluster import ask

CANCEL = Cancelled(0)
Runner = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Runner:
    """Run a coroutine on a loop; every test ends with no thread of ours left behind."""
    factory = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop

    def runner(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=factory, debug=request.param == "asyncio") as loop:
            loop.run(asyncio.wait_for(main, 240))
        assert not [t for t in threading.enumerate() if t.name.startswith("device")]

    return runner


@pytest.mark.parametrize("stages", [1, 3])
def test_text_over_tcp_is_the_reference_decoders(run: Runner, stages: int) -> None:
    async def main() -> None:
        async with LocalCluster(stages) as cluster:
            asked = [
                ask(0, max_new_tokens=40),
                ask(1, max_new_tokens=30, policy="pruned", prompt=tuple(range(15))),
                ask(2, max_new_tokens=30, sampling=Sampling(temperature=0.8, seed=5)),
            ]
            ends = await asyncio.gather(*(cluster.ask(request) for request in asked))
            for request, end in zip(asked, ends, strict=True):
                expected = decode(
                    partial(cluster.model.next_token, settings=request.sampling),
                    request.prompt,
                    request.max_new_tokens,
                )
                assert tuple(cluster.shells[0].tokens[request.request]) == expected
                assert end.reason == "length"
                assert end.stats["bytes_sent"] > 0
                assert end.stats["rows"] >= stages * len(expected)
            for rank in range(1, stages + 1):
                assert not cluster.nodes[rank]._outgoing.session_bytes, (
                    "an ended session leaves no entry behind"
                )

    run(main())


def test_a_node_that_has_not_run_yet_is_idle(run: Runner) -> None:
    """``/ready`` may ask before the event loop has started the node's task."""

    async def main() -> None:
        async with LocalCluster(1) as cluster:
            node = cluster.nodes[1]
            assert not node.links
            assert (node.busy_seconds, node.jobs) == (0.0, 0)

    run(main())


def test_prompts_that_are_given_up_leave_no_entry_behind(run: Runner) -> None:
    """Those that are kept too long for the books of the answer."""

    async def main() -> None:
        async with LocalCluster(2) as cluster:
            for number in range(12):
                prompt = (number, *(i % 16 for i in range(80)))
                await cluster.ask(ask(number, max_new_tokens=2, prompt=prompt))
            assert len(cluster.nodes[0].state.cached_prompts) < 12
            assert not cluster.nodes[0]._outgoing.session_bytes

    run(main())


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_session_that_a_break_has_ended_leaves_no_entry_behind(run: Runner, lost: int) -> None:
    """And what it has cost counts, also on the links that are gone."""

    async def main() -> None:
        async with LocalCluster(3) as cluster:
            end = asyncio.ensure_future(cluster.ask(ask(0, max_new_tokens=60)))
            await cluster.shells[0].has(0, 20)
            before = sum(cluster.nodes[0]._outgoing.session_bytes.values())
            await cluster.stop(lost)
            assert sum(cluster.nodes[0]._outgoing.session_bytes.values()) >= before
            cluster.start(lost)
            stats = (await end).stats
            assert stats["sessions"] >= 2
            assert stats["bytes_sent"] > before
            for node in cluster.nodes.values():
                assert not node._outgoing.session_bytes

    run(main())


@pytest.mark.parametrize("features", [(FINAL,), (0, 2, 3)])
def test_features_over_tcp_are_the_targets_own(run: Runner, features: tuple[int, ...]) -> None:
    """The toy head refuses any other; a stage that comes back must send all of them again."""

    async def main() -> None:
        async with LocalCluster(3, features=features) as cluster:
            prompt = tuple(range(15))
            end = asyncio.ensure_future(cluster.ask(ask(0, max_new_tokens=60, prompt=prompt)))
            await cluster.shells[0].has(0, 20)
            await cluster.stop(2)
            cluster.start(2)
            # One more where the draft node meets the stage again before the one before it does.
            assert (await end).stats["sessions"] >= 2
            expected = decode(
                lambda tokens: cluster.model.next_token(tokens, Sampling()), prompt, 60
            )
            assert tuple(cluster.shells[0].tokens[0]) == expected

    run(main())


def test_features_of_another_width_cost_the_stage_its_link(run: Runner) -> None:
    async def main() -> None:
        async with LocalCluster(1, features=(FINAL,)) as cluster:
            await cluster.ask(ask(0, max_new_tokens=3))
            verdict = Verdict(SessionId(0), SegmentId(0), Version(0), (), (), (NodeId(0),))
            tensor = WireTensor("uint64", (1, 2), memoryview(bytes(16)))
            cluster.nodes[1].links[Rank(0)].send(verdict, tensor)
            shell = cluster.shells[0]
            gone = (1, False, "features of shape (1, 2), expected 1")
            while (await shell.changes.get()) != gone:
                pass
            assert (await cluster.ask(ask(1, max_new_tokens=9))).reason == "length"

    run(main())


class Deaf(asyncio.SelectorEventLoop):
    """A loop on whose network the first connections are never answered, as by a machine that is off
    or a firewall that drops what it does not like."""

    unanswered = 3

    async def create_connection(self, *args: Any, **options: Any) -> Any:
        if self.unanswered:
            self.unanswered -= 1
            await asyncio.Event().wait()
        return await super().create_connection(*args, **options)


def test_a_silent_peer_is_dialled_again() -> None:
    async def main() -> None:
        async with LocalCluster(2) as cluster:
            end = await cluster.ask(ask(0, max_new_tokens=5))
            assert end.reason == "length"

    with asyncio.Runner(loop_factory=Deaf) as loop:
        loop.run(asyncio.wait_for(main(), 240))


class FlippingTransport:
    """Flips the last bit of a link's next writes."""

    def __init__(self, link: Link, writes: int = 1) -> None:
        self._transport: Any = link._transport
        self._left = writes
        link._transport = cast("asyncio.Transport", self)

    def write(self, data: bytes | memoryview) -> None:
        if self._left:
            self._left -= 1
            data = bytes(data[:-1]) + bytes([data[-1] ^ 1])
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


@pytest.mark.parametrize(("sender", "receiver"), [(0, 1), (1, 2), (2, 3), (3, 0), (0, 3)])
def test_a_bit_flipped_on_its_way_costs_a_link_and_no_wrong_token(
    run: Runner, sender: int, receiver: int
) -> None:
    """Tokens, hidden states, verdicts, prunes."""

    async def main() -> None:
        async with LocalCluster(3) as cluster:
            asked = ask(0, max_new_tokens=60)
            end = asyncio.ensure_future(cluster.ask(asked))
            await cluster.shells[0].has(0, 20)
            while not (changes := cluster.shells[receiver].changes).empty():
                changes.get_nowait()
            FlippingTransport(cluster.nodes[sender].links[Rank(receiver)])
            assert (await end).stats["sessions"] >= 2
            lost = await changes.get()
            while lost[1] or "flipped" not in lost[2]:
                lost = await changes.get()
            assert lost[0] == sender
            next_token = partial(cluster.model.next_token, settings=asked.sampling)
            expected = decode(next_token, asked.prompt, asked.max_new_tokens)
            assert tuple(cluster.shells[0].tokens[0]) == expected

    run(main())


def test_our_own_mistake_ends_the_node_with_its_story(run: Runner) -> None:
    async def main() -> None:
        async with LocalCluster(1) as cluster:
            await cluster.ask(ask(0, max_new_tokens=3))
            cluster.nodes[1].feed(CANCEL)
            node = cluster.nodes.pop(1)
            with pytest.raises(Exception, match="no use for Cancelled") as caught:
                await cluster.tasks[1]
            assert "received Segment from rank 0" in caught.value.__notes__[0]
            node.stop()

    run(main())


@pytest.mark.parametrize("hurried", [False, True])
def test_a_node_whose_device_hangs_is_stopped(run: Runner, hurried: bool) -> None:
    """When its job has taken too long, or where it is stopped once more."""
    hung, release = threading.Event(), threading.Event()

    def hanging(run: Any) -> Any:
        def one(job: Job) -> Any:
            hung.set()
            release.wait()
            return run(job)

        return one

    async def main() -> None:
        seconds = 60.0 if hurried else 0.1
        async with LocalCluster(1, device_seconds=seconds, devices={1: hanging}) as cluster:
            pending = asyncio.create_task(cluster.ask(ask(0)))
            await asyncio.to_thread(hung.wait)
            node, task = cluster.nodes.pop(1), cluster.tasks.pop(1)
            assert node._device is not None
            thread = node._device._thread
            try:
                node.stop()
                if hurried:
                    node.stop()
                    await task
                else:
                    with pytest.raises(ClusterError, match="the device has been busy with one"):
                        await task
                assert thread.is_alive()
            finally:
                release.set()
                pending.cancel()
            await asyncio.to_thread(thread.join)

    run(main())
