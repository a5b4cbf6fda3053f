"""The measurements of the pipeline's limits measure what they say; how fast is not asked here."""

from __future__ import annotations

import asyncio

import pytest

from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.cluster.config import DraftTable, PaceTable, TargetTable
from asyncspec_nodes.local.cluster import LocalCluster, local_config
from tools.bench.limits.requests import OPENINGS, Reply, speed, turn_about

pytestmark = pytest.mark.nightly


def test_all_ways_to_an_answer_are_asked_in_turn_and_agree() -> None:
    config = local_config(
        TargetTable(path=str(BUNDLED_TARGET)),
        DraftTable(source="ngram"),
        2,
        1,
        stage_pace=PaceTable(seconds=0.001),
    )
    ticks: list[int] = []

    async def work() -> dict[str, dict[str, list[Reply]]]:
        async with LocalCluster(config, lambda report: None) as cluster:
            asked = {"flowspec": 12, "autoregressive": 6}
            return await turn_about({"it": cluster}, asked, lambda: ticks.append(1), OPENINGS[:2])

    found = asyncio.run(work())["it"]
    assert len(ticks) == 4
    for policy, tokens in (("flowspec", 12), ("autoregressive", 6)):
        assert [len(reply.tokens) for reply in found[policy]] == [tokens, tokens]
    assert found["flowspec"][0].tokens[:6] == found["autoregressive"][0].tokens
    # Two stages: a token takes two turns.
    assert speed(found["autoregressive"]).tokens_per_turn == pytest.approx(0.5)
