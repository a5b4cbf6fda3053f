"""``bench dipsd``: its sweeps and tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncspec_nodes.reference import CheckRequest
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import PlanStatus, Submit
from tools.bench.__main__ import main
from tools.bench.dipsd.curves import CURVES, points
from tools.bench.dipsd.optimality import Proof, proofs_markdown
from tools.bench.dipsd.output import write_curve
from tools.bench.dipsd.quality import Quality, quality_markdown
from tools.bench.dipsd.run_time import Answer, Measured, Row, table, throughput
from tools.bench.dipsd.unsteady import Unsteady, unsteady_markdown


def test_every_sweep_can_be_described() -> None:
    assert len({curve.name for curve in CURVES}) == len(CURVES)
    for curve in CURVES:
        deployments = [curve.at(value) for value in curve.values]
        assert len(set(deployments)) == len(deployments)


def test_figure_3_bends_where_the_paper_says(tmp_path: Path) -> None:
    (curve,) = (c._replace(values=[0.5, 0.78, 0.95]) for c in CURVES if c.name == "fig3-alpha")
    found = points(curve)
    # Rotation alone loses with poor guesses and wins with good ones; one batch is close behind.
    theirs = [(p.rates["algorithm1"] or 0) / (p.rates["ad_greedy"] or 1) for p in found]
    assert theirs == pytest.approx([0.901, 1.376, 1.931], abs=1e-3)
    assert [point.batches for point in found] == [1, 2, 3]
    assert "x one_batch" in write_curve(curve, found, tmp_path)
    assert len(json.loads((tmp_path / "fig3-alpha.json").read_text())["points"]) == 3
    assert (tmp_path / "fig3-alpha.png").stat().st_size > 1000


def test_tables_are_markdown() -> None:
    row = Quality("paper", 2, "ours", 3, 3, 1.0, 1.0, 1.0, 0.1)
    assert quality_markdown([row]).splitlines()[-1].count("|") == 9
    proof = Proof("paper", 2, 3, 1e-9, 0.001, 1.2)
    assert "| 1e-09 | 0.001 | 1.2 |" in proofs_markdown([proof])
    reported = Unsteady(4, "as planned", 1.0, 1.0, None, 1.0)
    assert unsteady_markdown([reported]).splitlines()[-1].count("|") == 7


def test_a_count_of_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dipsd", "--out", str(tmp_path), "--count", "0"]) == 2
    assert "--count is 0" in capsys.readouterr().err


def test_all_users_tokens_count_until_the_first_is_done() -> None:
    request = CheckRequest(Submit(0, "", 4, 0, 0.0, 0, 1.0), ())
    slow = Answer(request, tuple((float(at), 1) for at in range(21)), {})
    fast = Answer(request, tuple((float(at), 2) for at in range(11)), {})
    # From 4 to 10: six tokens of the one, twelve of the other.
    assert throughput([slow, fast]) == pytest.approx(3.0)


def test_a_run_is_shown_beside_what_the_first_stage_says() -> None:
    reported = PlanStatus(
        0,
        sessions=(SessionId(1), SessionId(2)),
        means=(0.7, 0.8),
        used="plan",
        batches=(1, 2),
        planned=65.0,
        greedy=48.0,
        throughput=62.5,
        measured_seconds=9.0,
    )
    rows = (Row("dip-sd:length=2,plan=false", 50.0), Row("dip-sd", 60.0))
    text = table(Measured(rows, (reported,), 12, 12))
    assert "| `dip-sd` | 60.0 | 1.200 |" in text
    assert "| forecast of plan (2 batches in use) | 65.0 | 1.300 |" in text
    assert "| brought, by the first stage's count of 9 s | 62.5 | 1.250 |" in text
    assert any("alpha 0.75" in line for line in text)
    assert "12 of 12" in text[-1]
