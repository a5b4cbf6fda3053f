"""``python tools/check_device``: its report, and what it says of devices there are not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from asyncspec.core.errors import ClusterError
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from backend.gguf_models import convert
from commands import usage_error
from tools.bench.bits.shapes import PUBLISHED, Shape
from tools.check_device import gguf_devices, torch_devices
from tools.check_device.command import main
from tools.check_device.gguf_devices import table
from tools.check_device.measure import Measured, measure
from tools.check_device.torch_devices import OneKind, Run


@pytest.mark.nightly
@pytest.mark.processes
def test_a_model_on_the_cpu(tmp_path: Path) -> None:
    found = measure(convert(BUNDLED_TARGET, tmp_path / "m.gguf", "Q8_0"), None, "cpu")
    assert (found.guarantee, found.problems) == ("bitwise", [])
    assert found.equal == {"autoregressive": True, "flowspec": True}
    assert found.pass_ms.keys() >= {1, 16}
    assert 0 < found.python_ms < 100


def test_the_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    broken = Measured("m.gguf", "cpu", problems=["it is truncated"])
    monkeypatch.setattr(gguf_devices, "measure", lambda *model: broken)
    assert main(["--no-tests", "--only", "gguf"]) == 1
    said = capsys.readouterr().out
    assert said.count("- m.gguf on cpu: it is truncated") == 3
    assert "\nllama-cpp-python " in said
    fine = Measured(
        "m", "CUDA0", "F16", "tolerance", {1: 2.0}, 0.25, {"flowspec": 8}, {"flowspec": True}
    )
    assert "| m | CUDA0 | tolerance | 2.00 | 0.25 | - | 8.0 | yes |" in table([fine])
    fine.equal["flowspec"] = False
    assert fine.good
    fine.guarantee = "bitwise"
    assert not fine.good


def test_a_missing_device_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cuda7"]) == 2
    assert "device cuda7: llama.cpp finds cpu" in capsys.readouterr().err
    assert main(["--device", "cuda7", "--only", "torch"]) == 2
    assert "device cuda7: torch " in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--only", "gguf", "--device", "x"], ["--target", "m.gguf"]])
def test_gguf_models_need_llama_cpp(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    assert main([*words, "--no-tests"]) == 2
    said = 'check_device: llama.cpp is not installed; GGUF files need it: pip install "asyncspec['
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--only", "torch", "--target", "m.gguf"], "leave --only torch out"),
        (["--draft", "m.gguf"], "--draft is the draft model of --target"),
        (["--only", "cpu"], "invalid choice: 'cpu'"),
        (["--devices", "cpu"], "unrecognized arguments: --devices cpu"),
        (["--out", "no/report.md"], "--out no/report.md: there is no folder no"),
    ],
)
def test_a_users_mistake_is_a_line(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text in usage_error(capsys, *words, main=main)


def test_a_cluster_that_fails_is_no_mistake_of_the_user(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(*_: object) -> None:
        raise ClusterError("node 1 has ended")

    monkeypatch.setattr(torch_devices, "measure", failing)
    assert main(["--device", "cpu", "--only", "torch", "--no-tests"]) == 1
    assert capsys.readouterr().err == "check_device: node 1 has ended\n"


@pytest.mark.nightly
@pytest.mark.torch
def test_layers_on_a_device_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PUBLISHED, "small", Shape("llama", 64, 96, 4, 2))
    monkeypatch.setattr(torch_devices, "_REPEATS", 1)
    (found,) = torch_devices.measure("small", 1, "emulated", torch_devices.KINDS[2:3])
    assert (found.problems, found.guarantee, found.graphs) == ([], "bitwise", "yes")
    assert (found.positions, found.other_bits, found.other_tokens) == (40, 0, 0)
    assert {1, 256} <= found.exact_ms.keys() == found.fast_ms.keys()
    said = torch_devices.table([found], [])
    assert "| small | emulated | float32 | bitwise | 0 of 40 | 16, 64, 256 | yes |" in said


def test_the_report_of_torch_s_devices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = OneKind("m", "emulated", "int4", problems=["it is out of memory"])
    monkeypatch.setattr(torch_devices, "measure", lambda *_: [kind])
    runs = [Run("emulated", 2, "flow", 8.0, "bitwise", equal=True)]
    monkeypatch.setattr(torch_devices, "run_clusters", lambda _: runs)
    command = ["--device", "emulated", "--only", "torch", "--models", "qwen3-4b", "--no-tests"]
    assert main(command) == 1
    said = capsys.readouterr().out
    assert "- m in int4 on emulated: it is out of memory" in said
    assert "| emulated | 2 | flow | 8.0 | bitwise | yes |" in said
    kind.problems.clear()
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["figures"]["torch"][0]["kind"] == "int4"
    runs[0].equal = False
    assert main(command) == 1
    runs[0].guarantee = "tolerance"
    assert main(command) == 0
