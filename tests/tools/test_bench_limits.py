"""The measurements of the pipeline's limits measure what they say; how fast is not asked here."""

from __future__ import annotations

import asyncio

import pytest

from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.cluster.config import DraftTable, PaceTable, TargetTable
from asyncspec_nodes.local.cluster import LocalCluster, local_config
from tools.bench.__main__ import main
from tools.bench.limits import codec, hop
from tools.bench.limits.bandwidth import BEDS, Bandwidth
from tools.bench.limits.bound import Bound
from tools.bench.limits.padded import STAGE_SECONDS, Padded
from tools.bench.limits.requests import OPENINGS, Reply, Speed, speed, turn_about
from tools.bench.limits.wan import Wan


def test_speed_sums_what_came_after_the_first_tokens() -> None:
    stats = {"new_tokens": 11, "turns": 20, "decode_seconds": 2.0}
    found = speed([Reply((), stats), Reply((), stats)])
    assert found == Speed(20, 40, 4.0)
    assert (found.tokens_per_second, found.tokens_per_turn, found.turn_seconds) == (5, 0.5, 0.1)


def test_at_the_limit_a_turn_takes_a_stages_time() -> None:
    at_limit = Speed(tokens=50, turns=100, seconds=100 * STAGE_SECONDS)
    slower = Speed(tokens=50, turns=100, seconds=125 * STAGE_SECONDS)
    found = Padded({"flow": at_limit, "flowspec": at_limit, "autoregressive": slower})
    assert found.efficiency("flowspec") == pytest.approx(1)
    assert found.efficiency("autoregressive") == pytest.approx(0.8)
    assert found.turn == pytest.approx(1.25)


def test_retention_is_slow_over_fast_and_ratios_are_of_speeds() -> None:
    fast, slow = Speed(10, 10, 1.0), Speed(10, 10, 1.25)
    lines = Bandwidth({BEDS[0]: {"flowspec": fast}, BEDS[1]: {"flowspec": slow}}, ())
    assert lines.retention("flowspec") == pytest.approx(0.8)
    assert Wan({"mix": {"flowspec": fast, "chain": slow}}, ()).ratio(
        "mix", "flowspec", "chain"
    ) == pytest.approx(1.25)
    assert Bound(one_pass=2.0, weights=1.0, nbytes=1).share == 0.5


def test_a_segment_goes_through_a_node_without_layers_and_back() -> None:
    found = hop.measure(rounds=5)
    assert found.bytes > hop.ROWS * hop.WIDTH * 2
    assert found.node > 0 < found.node_cpu


def test_a_frame_goes_through_the_codec() -> None:
    assert codec.measure() > 0


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


def test_a_part_that_is_not_there_is_the_users_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["limits", "--only", "padded,speed"]) == 2
    assert "there is no part 'speed'" in capsys.readouterr().err
