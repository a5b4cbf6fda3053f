"""Faults of real processes: answers go on with the same text, and nothing is left behind."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec_nodes.cluster.config import DraftTable, PaceTable, TargetTable
from asyncspec_nodes.local.cluster import LocalCluster, local_config
from asyncspec_nodes.node.supervisor import RESTARTS
from asyncspec_protocol.messages import Submit
from nodes.background import no_process_left
from nodes.test_processes import TOY
from tools.bench.faults.health import asked
from tools.bench.faults.relay import RelayedLauncher
from tools.bench.faults.runs import Bed, Case, Outcome, wait_after

CASES = (
    Case("kill", (0, 2), "decode"),
    Case("cut", (1,), "decode"),
    Case("restart", (0,), "prefill"),
)


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_answers_go_on() -> None:
    """The draft node and a stage killed at once, a link cut without a FIN, a draft node that ends
    while it reads a prompt; the toy model needs no torch."""
    launcher = RelayedLauncher()
    pace = PaceTable(seconds=0.02)
    config = local_config(
        TargetTable(path=TOY),
        DraftTable(source="none", policy="autoregressive"),
        2,
        2,
        stage_pace=pace,
    )
    cluster = LocalCluster(config, lambda report: None, launch=launcher, restarts=RESTARTS)
    submit = Submit(0, "1 2 3 " * 40, 40, 5, 0.8, 0, 0.95, ignore_eos=True)

    async def main() -> list[Outcome]:
        async with cluster:
            bed = Bed(cluster, launcher, submit)
            await bed.begin()
            found = [await bed.run(case) for case in CASES]
            await bed.settled()
            return found

    with no_process_left():
        outcomes = asyncio.run(main())
    assert [(one.equal, one.error) for one in outcomes] == [(True, "")] * len(CASES)
    assert all(one.seconds > 0 for one in outcomes)


@given(st.floats(0, 1), st.lists(st.floats(0, 2), max_size=9).map(sorted))
def test_the_wait_ends_with_the_token_behind_the_longest_gap(
    fault: float, times: list[float]
) -> None:
    wait = wait_after(fault, times)
    after = [at for at in times if at > fault]
    assert (wait == 0) == (not after)
    if after:
        assert fault + wait == pytest.approx(min(after, key=lambda at: abs(at - fault - wait)))
        assert wait >= after[0] - fault - 1e-9


def test_health_is_asked_until_the_load_is_over() -> None:
    async def main() -> list[float]:
        asks = asyncio.Queue[None]()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                asks.put_nowait(None)

        server = await asyncio.start_server(answer, "127.0.0.1")
        seconds: list[float] = []
        async with asyncio.timeout(60), asked(server.sockets[0].getsockname()[1], seconds):
            for _ in range(3):
                await asks.get()
        server.close()
        return seconds

    seconds = asyncio.run(main())
    assert len(seconds) >= 2
    assert all(one > 0 for one in seconds)
