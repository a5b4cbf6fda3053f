"""Traces of real processes: what a user sees of ``run --trace``, ``record`` and ``trace``."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from asyncspec.trace.file import read_trace
from asyncspec.trace.records import End, NodeRecord, Text
from asyncspec_nodes.cli import main as cli
from asyncspec_nodes.cluster.checkpoints import BUNDLED_DRAFT, BUNDLED_TARGET
from asyncspec_nodes.cluster.config import DraftTable, TargetTable, TraceTable
from asyncspec_nodes.local.cluster import local_config
from nodes.background import Background

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.torch]


@pytest.fixture(scope="module", params=[1, 4])
def traced(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, int]:
    """A trace of a run with so many stages, and two prompts one after the other."""
    folder = tmp_path_factory.mktemp("trace")
    path, prompts = folder / "run.trace", folder / "prompts.jsonl"
    prompts.write_text(2 * '{"prompt": "Once upon a time there was a little fox"}\n')
    argv = ["--stages", str(request.param), "--trace", str(path), "--temperature", "0.8"]
    argv += ["--prompts", str(prompts), "--concurrency", "1", "--max-new-tokens", "96"]
    assert cli.main(["run", *argv]) == 0
    return path, request.param


def test_every_node_is_there_to_its_end(traced: tuple[Path, int]) -> None:
    path, stages = traced
    lines = read_trace(path).lines
    for kind in (NodeRecord, End):
        assert sorted(line.rank for line in lines if isinstance(line, kind)) == [*range(stages + 1)]
    said = [line for line in lines if isinstance(line, Text)]
    assert sum(len(line.tokens) for line in said) == 2 * 96


def test_a_recording_can_be_replayed(
    traced: tuple[Path, int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["trace", str(traced[0]), "--replay"]) == 0
    assert capsys.readouterr().out.count("the same effects") == traced[1] + 1


def test_where_the_time_went(traced: tuple[Path, int], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", str(traced[0]), "--summary", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert "is the bottleneck: " in summary["bottleneck"]
    # The first one may wait for nodes that are still being linked.
    _, request = summary["requests"]
    known = sum(part for name, part in request["resources"].items() if name != "other")
    assert known >= 0.95 * request["seconds"]
    assert known <= 1.0001 * request["seconds"]
    _, decoding = summary["decoding"]
    names = [device["device"] for device in summary["devices"]]
    assert names == ["D0", "V1", "V2", "V3", "V4"][: traced[1] + 1]
    assert 0 < decoding["seconds"] < request["seconds"]
    for clock in summary["clocks"][1:]:
        # All processes here have the same clock: the truth is an offset of none.
        assert clock["probes"] > 0
        assert abs(clock["offset"]) <= clock["uncertainty"] < 0.05


def test_other_forms(
    traced: tuple[Path, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = traced
    page, events = tmp_path / "page.html", tmp_path / "events.json"
    assert cli.main(["trace", str(path), "-o", str(page)]) == 0
    assert cli.main(["trace", str(path), "--perfetto", str(events)]) == 0
    assert capsys.readouterr().out.split() == [str(page), str(events)]
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert json.loads(events.read_bytes())["traceEvents"]
    assert cli.main(["trace", str(path), "--summary"]) == 0
    assert "bottleneck" in capsys.readouterr().out


def test_a_running_cluster_can_be_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = local_config(
        TargetTable(path=str(BUNDLED_TARGET)), DraftTable(source=str(BUNDLED_DRAFT)), 2, 1
    )
    config = msgspec.structs.replace(config, trace=TraceTable(events=10_000))
    path = tmp_path / "t"

    cluster = Background(config)
    try:
        argv = ["--prompt", "The fox", "--max-new-tokens", "8", "--json"]
        code, out, _ = cluster.ask(capsys, *argv)
        assert (code, len(json.loads(out)["token_ids"])) == (0, 8)
        code, _, err = cluster.command(capsys, "record", "--last", "60", str(path))
        assert code == 0
        assert "asyncspec trace" in err
        assert cluster.command(capsys, "drain")[0] == 0
        code, _, err = cluster.ask(capsys, *argv)
        assert (code, "it takes no new requests" in err) == (1, True)
        assert cluster.command(capsys, "drain", "--undo")[0] == 0
        assert cluster.ask(capsys, *argv)[0] == 0
    finally:
        cluster.close()
    lines = read_trace(path).lines
    assert {line.rank for line in lines if isinstance(line, NodeRecord)} == {0, 1, 2}
    assert not any(isinstance(line, Text) for line in lines), "no text unless it is wanted"
