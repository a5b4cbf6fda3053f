"""``bench report``'s engines: stages that look the text up give what real stages give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncspec.backend.base import LoadedSource
from asyncspec.core.sampling import Sampling
from asyncspec.plugins.hf.kernels.cpu.capabilities import KernelSettings
from asyncspec.plugins.hf.model.stage import load_stage
from asyncspec.sim.costs import PRESETS
from asyncspec.sim.world import Actor
from asyncspec_nodes.cluster.config import even_split
from asyncspec_nodes.plugins.simulation.cluster import with_trial
from asyncspec_nodes.roles.verify.config import VerifyConfig
from asyncspec_nodes.roles.verify.machine import VerifyMachine
from asyncspec_protocol.ids import Rank
from effort import nightly
from tools.bench.__main__ import main
from tools.bench.prompts import Prompt
from tools.bench.report.cell import Ask, Cell, Setting
from tools.bench.report.models import Models
from tools.bench.report.virtual import VirtualEngine

pytestmark = [pytest.mark.nightly, pytest.mark.torch]
PROMPT = Prompt("code", 0, "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n")


class RealStages(VirtualEngine):
    """The same, on stages of the target's own layers."""

    def _stage(
        self, setting: Setting, rank: Rank, text: tuple[int, ...], source: LoadedSource
    ) -> Actor:
        first, end = even_split(self.target.info.layers, setting.stages)[rank - 1]
        stage = load_stage(self.target.checkpoint, first, end, settings=KernelSettings())
        config = VerifyConfig(rank=rank, stages=setting.stages)
        machine = VerifyMachine(with_trial(config, setting.cost))
        return Actor(machine, machine.initial(), stage.run, stage)


@pytest.fixture(scope="module")
def engines() -> tuple[VirtualEngine, VirtualEngine]:
    return VirtualEngine(Models()), RealStages(Models())


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("policy", "source", "temperature"),
    [
        ("flowspec", "eagle", 0.8),
        ("flowspec", "hybrid", 0.0),
        ("pruned", "draft", 0.8),
        ("pipedec", "eagle", 0.0),
        nightly("flowspec", "eagle", 0.0),
        nightly("flowspec", "hybrid", 0.8),
        nightly("pruned", "draft", 0.0),
        nightly("pipedec", "eagle", 0.8),
    ],
)
def test_looked_up_verdicts_give_the_same_run_as_computed_ones(
    policy: str, source: str, temperature: float, engines: tuple[VirtualEngine, VirtualEngine]
) -> None:
    ask = Ask(PROMPT, Sampling(temperature=temperature, seed=3), tokens=24)
    cell = Cell(ask, Setting(policy, source, 2, PRESETS["jetson-7b"]))
    answer = engines[0].target.write(ask)
    # Both engines check the tokens; the numbers say that also the way to them is the same. What a
    # target says off the text is not looked up, and takes a byte more or less to write.
    stats, expected = (engine.measure(cell, answer) for engine in engines)
    assert stats.pop("bytes_sent") == pytest.approx(expected.pop("bytes_sent"), rel=1e-3)
    assert stats == expected
    assert stats["new_tokens"] == len(answer)


def prompts(folder: Path) -> Path:
    folder.mkdir()
    for name in ("code", "story"):
        line = json.dumps({"turns": [f"{name}: once upon a time"]})
        (folder / f"{name}.jsonl").write_text(f"{line}\n{line}\n")
    return folder


@pytest.mark.nightly
def test_the_command_writes_a_report_and_resumes_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = ["report", "--prompts", str(prompts(tmp_path / "prompts")), "--out", str(out)]
    argv += ["--only", "flowspec-figure5", "--stages", "2", "--max-new-tokens", "6"]
    assert main(argv) == 0
    lines = (out / "results.jsonl").read_bytes().splitlines()
    assert len(lines) == 2 + 2 * 3 * 4  # texts; methods at bandwidths; half of the prompts
    page, report = (out / "report.md").read_text(), json.loads((out / "report.json").read_text())
    (found,) = report["exhibits"]["flowspec-figure5"]["tables"]
    assert found["columns"] == ["1000", "500", "250", "125"]
    assert f"{found['values']['FlowSpec']['125']['value']:.2f}" in page
    assert report["about"]["machine"]["torch"] in page
    assert 0 < (out / "flowspec-figure5.png").stat().st_size < 150_000
    # Killed in the middle of a line: only what is missing is measured again.
    (out / "results.jsonl").write_bytes(b"\n".join(lines[:-3]) + b"\n" + lines[-3][:40])
    assert main(argv) == 0
    again = (out / "results.jsonl").read_bytes().splitlines()
    assert again == lines
    assert (out / "report.md").read_text() == page
