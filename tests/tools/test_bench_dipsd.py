"""``bench dipsd``: its sweeps and tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench.dipsd.curves import CURVES, points
from tools.bench.dipsd.output import write_curve

pytestmark = pytest.mark.nightly


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
