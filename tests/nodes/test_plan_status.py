"""What is planned, asked through a draft node of a toy cluster on loopback sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actor.local_cluster import QUICK, LocalCluster, hello
from asyncspec.actor.link import Link
from asyncspec.core.cost_model.passes import PassCost
from asyncspec.core.errors import ClusterError
from asyncspec.core.machine import Cancelled, Submitted
from asyncspec.plugins.dipsd.online.decide import decide
from asyncspec_nodes.client import client as clients
from asyncspec_nodes.client.client import Client
from asyncspec_nodes.node import inspector
from asyncspec_nodes.node.inspector import Inspector
from asyncspec_nodes.plugins.dipsd.running_cluster import measured
from asyncspec_nodes.roles.verify.batch_schedule import BatchSchedule
from asyncspec_nodes.roles.verify.config import VerifyConfig
from asyncspec_nodes.roles.verify.planning import plan_status
from asyncspec_nodes.roles.verify.session import VerifyState
from asyncspec_protocol.framing import decode, encode
from asyncspec_protocol.ids import DRAFT, Rank, SessionId, draft_rank
from asyncspec_protocol.messages import PassTimes, PlanStatus, PlanStatusRequest, Rates
from cluster import ask

SECOND = draft_rank(1)
ROWS = VerifyConfig(Rank(1), 1).batch_rows


class Other(Inspector):
    """A first stage that does something else with a query."""

    def received(self, link: Link, message: Any, data: memoryview | None) -> None:
        if isinstance(message, PlanStatusRequest):
            answer(link, message)
        else:
            super().received(link, message, data)


answer: Callable[[Link, PlanStatusRequest], object]


def inspected(cluster: LocalCluster, first: type[Inspector] = Inspector) -> None:
    for rank, node in cluster.nodes.items():
        kind = first if rank == 1 else Inspector
        kind(node, hello(rank, cluster.stages))


async def connect(cluster: LocalCluster, rank: int) -> Client:
    return await Client.connect(*cluster.ports[rank], "toy", options=QUICK)  # type: ignore[index]


def test_users_of_one_draft_node_are_seen_through_the_other() -> None:
    async def main() -> None:
        async with LocalCluster(2, drafts=2) as cluster:
            inspected(cluster)
            client = await connect(cluster, SECOND)
            await cluster.ask(ask(0, max_new_tokens=4))  # the pipeline stands
            assert await client.plan_status() == PlanStatus(0, batch_rows=ROWS)
            request = ask(1, max_new_tokens=4000, policy="dip-sd")
            cluster.nodes[0].feed(Submitted(request))
            while not (reported := await client.plan_status()).used:
                assert not reported.missing
            end = cluster.shells[0].end(1)
            assert not end.done()
            assert len(reported.sessions) == 1
            assert reported.lows[0] <= reported.means[0] <= reported.highs[0]
            assert len(reported.pass_seconds) == 2
            assert reported.lengths[0] > 0
            assert reported.greedy > 0
            cluster.nodes[0].feed(Cancelled(1))
            await end
            while (await client.plan_status()).sessions:
                pass
            await client.close()

    asyncio.run(main())


def ask_with(first: Callable[[Link, PlanStatusRequest], object]) -> str:
    """What a client is told where the first stage does that."""
    global answer
    answer = first

    async def main() -> str:
        async with LocalCluster(2) as cluster:
            inspected(cluster, Other)
            await cluster.ask(ask(0, max_new_tokens=4))
            client = await connect(cluster, 0)
            with pytest.raises(ClusterError) as caught:
                await client.plan_status()
            await client.close()
            return str(caught.value)

    return asyncio.run(main())


def test_a_silent_first_stage_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspector, "ANSWER_SECONDS", 0.05)
    said = ask_with(lambda link, message: None)
    assert said == "verify stage 1, which plans, does not answer within 0.05 s"


def test_a_first_stage_that_goes_is_named() -> None:
    said = ask_with(lambda link, message: link.close("enough"))
    assert said == "verify stage 1, which plans, is gone"


def test_a_first_stage_that_talks_nonsense_is_cut_off() -> None:
    said = ask_with(lambda link, message: link.send(PlanStatus(message.query, "", (7,))))  # type: ignore[arg-type]
    assert said == "verify stage 1, which plans, is gone"


def test_a_first_stage_that_is_not_there_is_named() -> None:
    async def main() -> None:
        async with LocalCluster(2) as cluster:
            inspected(cluster)
            await cluster.ask(ask(0, max_new_tokens=4))
            await cluster.stop(1)
            client = await connect(cluster, 0)
            with pytest.raises(ClusterError, match="stage 1, which plans, is not linked"):
                await client.plan_status()
            await client.close()

    asyncio.run(main())


def test_a_silent_draft_node_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "PLAN_STATUS_SECONDS", 0.05)

    class Deaf(Inspector):
        def received(self, link: Link, message: Any, data: memoryview | None) -> None:
            pass

    async def main() -> None:
        async with LocalCluster(1) as cluster:
            Deaf(cluster.nodes[0], hello(0, 1))
            client = await connect(cluster, 0)
            with pytest.raises(ClusterError, match=r"127\.0\.0\.1:\d+ does not say within 0\.05 s"):
                await client.plan_status()
            await client.close()

    asyncio.run(main())


def test_only_the_first_stage_is_asked() -> None:
    """A later one closes the link of whoever thinks it plans; so does anybody who is answered
    without having asked."""

    async def main() -> None:
        async with LocalCluster(2) as cluster:
            inspected(cluster)
            await cluster.ask(ask(0, max_new_tokens=4))
            gone = cluster.nodes[0].links[2].gone  # type: ignore[index]
            cluster.nodes[0].links[2].send(PlanStatusRequest(0))  # type: ignore[index]
            assert "only the first stage" in await gone

    asyncio.run(main())


huge = st.one_of(st.floats(0, 10), st.floats(0, 1.7e308))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.floats(1e-300, 1.7e308), huge), min_size=1, max_size=5), st.lists(huge)
)
def test_any_message_of_a_draft_node_gets_a_readable_answer(
    table: list[tuple[float, float]], said: list[float]
) -> None:
    """Else one that lies would cost the others who ask their links to the first stage."""
    rows = tuple(sorted({row for row, _ in table}))
    times = PassTimes(Rank(2), rows, tuple(s for _, s in table[: len(rows)]), sum(said[:1]))
    first, second, third = (*said, 1.0, 1.0, 1.0)[:3]
    rates = Rates(SessionId(7), 9, 0.5, first, second, third, third, 0.2, 0.1, second)
    schedule = BatchSchedule(members={rates.session: rates}, pass_times={DRAFT: {Rank(2): times}})
    cost = PassCost().observe(4, 0.1)
    state = VerifyState(config=VerifyConfig(Rank(1), 2), schedule=schedule, cost=cost)
    reported = plan_status(state, 3)
    assert decode(encode(reported)).message == reported
    assert reported.sessions == (7,)
    found = measured(reported)
    decide(found.deployment, found.noise)
