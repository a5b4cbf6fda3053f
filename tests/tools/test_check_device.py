"""``python tools/check_device``: its report, and what it says of devices there are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from backend.gguf_models import convert
from tools.check_device import command
from tools.check_device.command import main, table
from tools.check_device.measure import Measured, measure


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
    monkeypatch.setattr(command, "measure", lambda *model: broken)
    assert main(["--no-tests"]) == 1
    said = capsys.readouterr().out
    assert said.count("- m.gguf on cpu: it is truncated") == 3
    assert said.startswith("llama-cpp-python ")
    fine = Measured(
        "m", "CUDA0", "F16", "tolerance", {1: 2.0}, 0.25, {"flowspec": 8}, {"flowspec": True}
    )
    assert "| m | CUDA0 | tolerance | 2.00 | 0.25 | - | 8.0 | yes |" in table([fine])


def test_a_missing_device_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cuda7"]) == 2
    assert "device cuda7: llama.cpp finds cpu" in capsys.readouterr().err
