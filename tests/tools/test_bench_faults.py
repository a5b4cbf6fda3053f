"""Faults of real processes: answers go on with the same text, and nothing is left behind."""

from __future__ import annotations

import asyncio

import pytest

from asyncspec_nodes.cluster.config import DraftTable, PaceTable, TargetTable
from asyncspec_nodes.local.cluster import LocalCluster, local_config
from asyncspec_nodes.node.supervisor import RESTARTS
from asyncspec_protocol.messages import Submit
from nodes.background import no_process_left
from nodes.test_processes import TOY
from tools.bench.faults.relay import RelayedLauncher
from tools.bench.faults.runs import Bed, Case, Outcome

pytestmark = pytest.mark.nightly

CASES = (
    Case("kill", (0, 2), "decode"),
    Case("cut", (1,), "decode"),
    Case("restart", (0,), "prefill"),
)


@pytest.mark.nightly
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
