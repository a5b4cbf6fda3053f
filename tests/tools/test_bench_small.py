"""The bench's smaller measurements."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from asyncspec.sim.recorded import FORMAT, LanguageHeader, RecordedText
from asyncspec_nodes.cluster.checkpoints import BUNDLED_DRAFT, BUNDLED_EAGLE, BUNDLED_TARGET
from tools.bench import coverage, drafting, quantised, stage_time
from tools.bench.__main__ import main
from tools.bench.record_language import write_language
from tools.bench.report.models import Models
from tools.bench.report.source_table import source_rows
from tools.bench.report.table import Table, Value

pytestmark = pytest.mark.nightly


def test_coverage_counts_places_by_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = ((-0.1, -2.0), (-0.1, -2.0), (-0.1, -2.0), (-0.1, -2.0))
    text = RecordedText((1,), (5, 6, 7, 8), ((5, 9), (9, 6), (9, 4), (8, 1)), scores)
    assert coverage.coverage([text]) == {1: 0.5, 2: 0.75}
    file = tmp_path / "language"
    write_language(file, LanguageHeader(FORMAT, "t", "d", 10), [text])
    assert coverage.run(argparse.Namespace(file=file, json=True)) == 0
    assert json.loads(capsys.readouterr().out) == {"1": 0.5, "2": 0.75}
    assert main(["coverage", str(tmp_path / "none")]) == 2


@pytest.mark.processes
def test_a_nodes_time_beside_its_engine(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--target", "toy:layers=4", "--stages", "2", "--repeats", "2", "--json"]
    assert main(["node-time", "--tokens", "40", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens_per_second"] > 0
    assert 0 <= found["ms_of_event_loop"] < 100
    assert main(["node-time", "--tokens", "0", *words]) == 2


@pytest.mark.torch
def test_a_stages_pass_is_timed_for_every_number_of_rows() -> None:
    options = argparse.Namespace(
        target=BUNDLED_TARGET, layers=1, context=8, repeats=2, mode="exact", device="cpu"
    )
    seconds = stage_time.measure(options, (1, 4))
    assert list(seconds) == [1, 4]
    assert all(0 < t < 10 for t in seconds.values())


@pytest.mark.torch
def test_every_product_of_this_cpu_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--outputs", "32", "--inputs", "16", "--mib", "1", "--rows", "1", "3"]
    assert main(["products", *words, "--repeats", "1", "--json"]) == 0
    one, three = json.loads(capsys.readouterr().out)
    assert (one.pop("rows"), three.pop("rows")) == (1, 3)
    assert one.keys() == three.keys() >= {"torch, float32", "bfloat16, widened slice by slice"}
    assert all(0 <= ms < 1000 for ms in one.values())


@pytest.mark.torch
def test_trees_are_timed_together_and_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    options = argparse.Namespace(
        target=BUNDLED_TARGET,
        draft=BUNDLED_DRAFT,
        eagle=BUNDLED_EAGLE,
        context=8,
        levels=2,
        width=3,
        repeats=2,
        json=True,
    )
    assert drafting.run(options) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(level["source"], level["sessions"]) for level in found] == [
        (source, count) for source in ("draft model", "EAGLE head") for count in drafting.SESSIONS
    ]
    for level in found:
        assert level["ratio"] == pytest.approx(level["one_by_one"] / level["together"])


@pytest.mark.nightly
@pytest.mark.torch
def test_ways_to_keep_weights_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_text("Once upon a time there was a fox. " * 60)
    options = argparse.Namespace(
        hidden=128, inner=192, layers=1, context=8, repeats=1, text=text, windows=1, json=True
    )
    assert quantised.run(options) == 0
    found = json.loads(capsys.readouterr().out)
    each = {(way["dtype"], way["quantize"], way["kernels"]): way for way in found["ways"]}
    sizes = [each[way]["bytes_per_weight"] for way in quantised.WAYS]
    assert sizes == sorted(sizes, reverse=True)
    assert set(each[quantised.BASE]["ratios"].values()) == {1.0}
    wanted = ["int8", "int8", "int4", "int4"]
    assert [line["quantize"] for line in found["errors"]] == wanted
    assert all(0 < x < 0.12 for line in found["errors"] for x in line["errors"].values())
    assert [line["quantize"] for line in found["text"]] == ["none", *wanted]
    dense, int8, *_ = found["text"]
    assert dense["agreement"] == 1
    assert 0.9 < int8["agreement"] <= 1
    assert int8["perplexity"] == pytest.approx(dense["perplexity"], rel=0.05)


@pytest.mark.torch
def test_the_source_table_has_a_price_of_every_source() -> None:
    values = {"ALT": Value(0.5), "ALR": Value(2.0), "accuracy": Value(0.75)}
    sources = ("ngram", "eagle+suffix")
    table = Table("", "", sources, tuple(values), dict.fromkeys(sources, values), ("alt",))
    lookup, mixed = source_rows(table, Models())
    assert lookup.keys() == mixed.keys()
    assert (mixed["source"], mixed["acceptance"]) == ("eagle+suffix", 0.75)
    assert all(float(row["level, ms"]) > 0 for row in (lookup, mixed))
