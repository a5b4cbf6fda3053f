"""``bench dipsd-machines``: plans for four users, drafting ahead, and its page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from tools.bench.__main__ import main
from tools.bench.dipsd.machines.cases import CASES, Case
from tools.bench.dipsd.machines.crowd import Crowd
from tools.bench.dipsd.machines.measure import Ask, compare
from tools.bench.dipsd.machines.page import draw, page


def rate(case: Case, policy: str, users: int = 4, tokens: int = 150) -> float:
    """Tokens a second; texts are checked."""
    return Crowd(case, users, 1, policy, tokens).run().tokens_per_second


def test_four_users_as_planned_have_what_was_forecast(tmp_path: Path) -> None:
    """And what greedy batching has with the best length for all, which nobody knows before."""
    found = compare(Ask(CASES["equal"], 4, 1))
    forecast = found.planned.forecast
    assert forecast is not None
    assert found.planned.planned == 1.0
    assert 0.85 * forecast < found.planned.tokens_per_second < 1.15 * forecast
    assert found.ratio > 0.95
    assert found.planned.tokens_per_second > min(found.greedy.values())
    assert f"({found.length}) | {found.planned.tokens_per_second:.1f} |" in page([found])
    draw([found], tmp_path / "machines.png")
    assert (tmp_path / "machines.png").stat().st_size > 1000


@pytest.mark.parametrize("case", [name for name in CASES if name != "equal"])
def test_four_users_on_machines_that_are_not_as_planned(case: str) -> None:
    """Never much worse than one length for all, on two stages, whatever happens."""
    greedy = Crowd(CASES[case], 4, 2, "dip-sd:length=4,plan=false", 120).run()
    planned = Crowd(CASES[case], 4, 2, "dip-sd", 120).run()
    assert greedy.forecast is None
    assert planned.forecast is not None
    assert planned.tokens_per_second > 0.8 * greedy.tokens_per_second


@pytest.mark.parametrize("policy", ["dip-sd:length=4,plan=false", "dip-sd"])
def test_drafting_ahead_brings_more_where_guesses_are_good(policy: str) -> None:
    case = replace(CASES["equal"], alpha=0.95, later=0.95)
    ahead = policy + ("," if ":" in policy else ":") + "ahead=true"
    assert rate(case, ahead) > 1.1 * rate(case, policy)


def test_drafting_ahead_costs_little_where_guesses_are_bad() -> None:
    case = replace(CASES["equal"], alpha=0.3, later=0.3, token=0.1)
    plain, ahead = "dip-sd:length=2,plan=false", "dip-sd:length=2,plan=false,ahead=true"
    assert rate(case, ahead) > 0.95 * rate(case, plain)


def test_invalid_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, why in (
        (["--users", "0"], "--users is 0"),
        (["--stages", "99"], "--stages is 99"),
        (["--only", "rain"], "there is no part 'rain'"),
        (["--jobs", "0"], "--jobs is 0"),
    ):
        assert main(["dipsd-machines", *wrong]) == 2
        assert why in capsys.readouterr().err


def test_the_command_writes_its_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--users", "2", "--stages", "1", "--only", "equal", "--max-new-tokens", "40"]
    assert main(["dipsd-machines", *small, "--json", "--jobs", "1", "--out", str(tmp_path)]) == 0
    (reported,) = json.loads(capsys.readouterr().out)["crowds"]
    assert reported["users"] == 2
    assert reported["planned"]["policy"] == "dip-sd"
    assert (tmp_path / "machines.md").read_text().startswith("| users |")
    assert (tmp_path / "machines.png").exists()
