"""The measurements of a service under load measure what they say; how fast is not asked here."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.errors import ClusterError
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.cluster.config import Config, DraftTable, PaceTable, TargetTable
from asyncspec_nodes.local.cluster import local_config
from tools.bench.__main__ import main
from tools.bench.serving import command, fairness, memory, padded, plots, prefill, simulated, soak
from tools.bench.serving.load import percentile, steady
from tools.bench.serving.parts import PARTS
from tools.bench.serving.pool import through
from tools.bench.serving.prompts import opening
from tools.bench.serving.service import Busy, served
from tools.bench.serving.streams import stream

running = st.integers(1, 6)


@given(running, st.integers(2, 4), st.integers(2, 9), st.floats(0.1, 9))
def test_littles_law_holds_where_places_are_never_idle(
    count: int, waves: int, tokens: int, gap: float
) -> None:
    """Answers that follow each other without a pause: every place gives a token a gap."""
    answers = [
        [gap * (wave * tokens + i) for i in range(tokens)]
        for wave in range(waves)
        for _ in range(count)
    ]
    found = steady(answers, count)
    assert found.between_mean == pytest.approx(gap)
    assert found.between_p99 == pytest.approx(gap)
    assert found.answer_p99 == pytest.approx(gap)
    # The first token of an answer has no token before it, but it does have its time.
    assert found.tokens_per_second == pytest.approx(count / gap)
    assert found.little == pytest.approx(1)


def test_a_load_is_measured_while_it_is_steady() -> None:
    # Two at a time of three: from 1, when both places have a token, to 4, when one stays empty.
    answers = [[0.0, 1.0, 2.0], [1.0, 3.0, 3.0, 9.0], [3.0, 4.0]]
    found = steady(answers, 2)
    assert found.tokens_per_second == pytest.approx(5 / 3)
    assert found.between_mean == pytest.approx((1 + 2 + 0 + 1) / 4)
    assert found.between_p99 == 2
    assert found.answer_p99 == pytest.approx(8 / 3)
    with pytest.raises(ValueError, match="too few or too short"):
        steady([[0.0, 1.0], [2.0, 3.0]], 2)


@given(st.lists(st.floats(-1e9, 1e9), min_size=1), st.floats(0.01, 1))
def test_a_percentile_is_one_of_the_values_and_so_many_exceed_it_at_most(
    values: list[float], share: float
) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value > found for value in values) <= (1 - share) * len(values) + 1e-9


@given(st.integers(0, 20), running)
def test_a_pool_has_so_many_running_and_every_answer_once(pool: int, count: int) -> None:
    now, most = 0, 0

    async def ask(number: int) -> int:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        return number

    assert asyncio.run(through(pool, count, ask)) == list(range(pool))
    assert most == min(pool, count)


def test_a_failing_request_stops_its_pool() -> None:
    async def ask(number: int) -> int:
        if number == 2:
            raise ClusterError("no")
        await asyncio.sleep(0)
        return number

    with pytest.raises(ClusterError, match="no"):
        asyncio.run(through(9, 2, ask))


def test_openings_differ() -> None:
    assert len({opening(number) for number in range(24)}) == 24


def test_simulated_policies_share_passes_and_obey_littles_law() -> None:
    ticks: list[int] = []
    curves = simulated.measure(
        lambda: ticks.append(1), costs=("server",), running=(1, 16), pool=1, tokens=16
    )
    assert len(ticks) == 2 * len(simulated.SERIES)
    by_name = {curve.series: curve for curve in curves}
    for curve in curves:
        assert [load.running for load in curve.loads] == [1, 16]
        assert all(0.75 <= load.little <= 1 + 1e-9 for load in curve.loads)
    # Eight stages are full with eight requests; beyond that only shared passes help.
    unbatched = by_name["autoregressive, unbatched"].at(16).tokens_per_second
    assert unbatched <= 1 + 1e-9
    assert by_name["autoregressive"].at(16).tokens_per_second > 1.5 * unbatched
    assert by_name["flowspec"].at(1).tokens_per_second > (
        2 * by_name["autoregressive"].at(1).tokens_per_second
    )


def test_the_padded_bed_gives_the_plain_targets_text() -> None:
    """``measure`` compares every text itself."""
    tokens = {"autoregressive": 4, "flowspec": 8}
    pace = PaceTable(seconds=0.002)
    found = asyncio.run(
        padded.measure(lambda: None, running=(1, 2), tokens=tokens, stages=2, stage_pace=pace)
    )
    for policy in tokens:
        assert [load.running for load in found.shared[policy]] == [1, 2]
        assert found.alone[policy].tokens_per_second > 0
        assert found.single[policy] > 0
    assert "flowspec" in PARTS["padded"].page(found)
    assert "single_flowspec" in PARTS["padded"].figures(found)


def test_a_wrong_text_is_a_bug_and_said() -> None:
    wrong = [(0,) * 4]
    config = padded.bed(1)

    async def work() -> None:
        async with AsyncExitStack() as stack:
            client = await padded._client(stack, config)
            await padded._checked(client, 0, "autoregressive", 4, wrong)

    with pytest.raises(ClusterError, match="this is a bug"):
        asyncio.run(work())


def _small(target: Path = BUNDLED_TARGET) -> Config:
    return local_config(TargetTable(path=str(target)), DraftTable(source="ngram"), 1, 4)


@pytest.mark.asyncio
@pytest.mark.parametrize("gguf", [False, True])
async def test_the_figures_of_a_service(gguf: bool, tmp_path: Path) -> None:
    target = BUNDLED_TARGET
    if gguf:
        gguf_models: Any = pytest.importorskip("backend.gguf_models")
        target = gguf_models.convert(target, tmp_path / "target.gguf", "Q8_0")
    async with served(_small(target)) as service:
        fair = await fairness.measure(service, streams=3, tokens=12)
        assert max(fair.tokens) == 12
        assert 0 <= fair.least_share <= 1  # a busy machine may starve one of so short streams
        kept = await memory.measure(service, warm_up=1, counts=(2, 5))
        assert set(kept.idle) == {"rank 0", "rank 1", "http"}
        assert list(kept.after) == [2, 5]
        assert kept.growth(5) > 0.5
        end = await soak.measure(service, 0.5, clients=5, connections=30)
        assert set(end.ends) <= {"whole", "streamed", "refused", "left", "busy"}, end.errors
        assert end.ends["whole"] > 0
        assert end.files_gained <= 0  # the connections of the first part are idle, and may end
        assert not any(end.left.values())
        for part, found in (("fairness", fair), ("memory", kept), ("soak", end)):
            assert PARTS[part].page(found)
            assert PARTS[part].figures(found)


@pytest.mark.asyncio
async def test_a_soak_counts_what_goes_wrong() -> None:
    """A service with two places turns others away, and that is not taken for an answer."""
    async with served(_small(), "--max-concurrent", "2") as service:
        answer = stream(service, prompt="x", max_tokens=400, ignore_eos=True)
        other = stream(service, prompt="x", max_tokens=400, ignore_eos=True)
        await anext(answer)
        await anext(other)
        with pytest.raises(Busy):
            await service.complete(prompt="x", max_tokens=1)
        state = await service.state()
        assert state["places"]["taken"] == 2
        with pytest.raises(ClusterError, match="400"):
            await service.complete(prompt="x", max_tokens=0)
        await answer.aclose()
        await other.aclose()
        assert not any((await service.settled()).values())


@pytest.mark.asyncio
async def test_a_service_has_settled_when_it_has_read_of_the_last_connection() -> None:
    async with served(_small()) as service:
        await asyncio.gather(service.state(), service.state())  # both connections stay open
        before = sum(service.files().values())
        _, writer = await asyncio.open_connection("127.0.0.1", service.port)
        while sum(service.files().values()) == before:
            await service.state()
        settling = asyncio.create_task(service.settled(before))
        for _ in range(5):
            await service.state()
        assert not settling.done()
        writer.close()
        await settling
        assert sum(service.files().values()) <= before


def test_the_least_share_is_of_the_mean() -> None:
    assert fairness.Fairness((2, 4, 6)).least_share == 0.5


@pytest.mark.asyncio
async def test_a_long_prompt_beside_a_stream(tmp_path: Path) -> None:
    target = prefill.longer_context(tmp_path, 4096)
    async with served(_small(target)) as service:
        assert (await service.state())["context_length"] == 4096
        held = await prefill.measure(
            service, "autoregressive", prompt_tokens=600, prompts=2, tokens=1000, idle_tokens=5
        )
    assert len(held.prompts) == 2
    # Of five pieces before each prompt; a gap that reaches into the prompt is beside it.
    assert len(held.idle) >= 6
    assert held.beside
    assert held.ratio > 0


def test_mistakes_of_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for argv, said in (
        (["--only", "speed"], "there is no part 'speed'"),
        (["--soak", "0"], "--soak is 0"),
        (["--soak", "nan"], "--soak is nan"),
        (["--out", str(file / "x")], "cannot write"),
    ):
        assert main(["serving", *argv]) == 2
        assert said in capsys.readouterr().err


def test_the_padded_figure_says_what_its_stages_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[str] = []
    monkeypatch.setattr(plots, "draw", lambda panels, unit, file: titles.extend(panels))
    draw = PARTS["padded"].draw
    assert draw is not None
    draw(padded.Padded({}, {}, {}), tmp_path / "padded.png")
    assert titles == ["4 x 80 ms"]


def test_figures_are_written(tmp_path: Path) -> None:
    curves = simulated.measure(lambda: None, costs=("server",), running=(1, 2), pool=1, tokens=8)
    command.write({"simulated": curves}, tmp_path)
    assert (tmp_path / "serving-simulated.png").stat().st_size > 1000
    assert "serving-simulated.png" in (tmp_path / "serving.md").read_text()
    figures = json.loads((tmp_path / "serving.json").read_text())
    assert figures["serving_simulated_throughput_server_autoregressive_2"] == 1
    assert figures["measured"]["simulated"][0]["loads"][0]["running"] == 1
