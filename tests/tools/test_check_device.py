"""``python tools/check_device``: its report, and what it says of devices there are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from backend.gguf_models import convert
from tools.bench.bits.shapes import PUBLISHED, Shape
from tools.check_device import gguf_devices, torch_devices
from tools.check_device.command import main
from tools.check_device.gguf_devices import table
from tools.check_device.measure import Measured, measure

pytestmark = pytest.mark.nightly


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
