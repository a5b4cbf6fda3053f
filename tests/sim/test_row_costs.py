"""Segments of a session that is alone follow what rows cost, by the virtual clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.cost_model.pipeline import PipelineCosts
from asyncspec.core.costs import DraftCost, StageCost
from asyncspec.sim.costs import ClusterCost
from asyncspec.sim.language import Synthetic, harmonic
from asyncspec_nodes.plugins.simulation.cluster import Outcome, Setting, simulate
from effort import nightly

# Of a CPU: 64 rows take eight times as long as one.
DEAR = StageCost(plateau=1, row_seconds=0.11)
FREE = StageCost(plateau=PARAMETERS.max_rows)


@pytest.fixture
def careless(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on nobody cares what rows cost."""
    return lambda: monkeypatch.setattr(PipelineCosts, "_lone_rows", lambda _: PARAMETERS.max_rows)


def run(policy: str, stage: StageCost, requests: int = 1) -> Outcome:
    """One request after another; the texts are checked."""
    language = Synthetic(coverage=harmonic(0.78), decay=0.95)
    cost = ClusterCost(stage=stage, draft=DraftCost(0.1))
    setting = Setting(language, cost, tokens=150, requests=requests, sessions=1)
    return simulate(setting, policy)


def first_token(outcome: Outcome) -> float:
    """Of the second request: by then stages have said what their passes take."""
    return outcome.stats[1]["first_token_seconds"] - outcome.stats[1]["queue_seconds"]


def speed(outcome: Outcome) -> float:
    return outcome.stats[0]["tokens_per_second"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["flowspec", "pipedec", "specpipe"])
def test_a_lone_session_sends_as_many_rows_as_cost_little(
    policy: str, careless: Callable[[], None]
) -> None:
    found = run(policy, DEAR)
    careless()
    before = run(policy, DEAR)
    assert speed(found) > 1.25 * speed(before)
    assert found.stats[0]["rows"] < 0.75 * before.stats[0]["rows"]


@pytest.mark.parametrize(
    ("policy", "stage"),
    [("flowspec", FREE), nightly("specpipe", FREE), ("chunked", DEAR), nightly("pruned", DEAR)],
)
def test_free_rows_and_trees_of_a_round_are_left_alone(
    policy: str, stage: StageCost, careless: Callable[[], None]
) -> None:
    found = run(policy, stage)
    careless()
    assert found == run(policy, stage)


GPU = StageCost(pass_seconds=0.02, plateau=256, row_seconds=0.02 / 256)
"""Reads its weights in the time in which it computes 256 rows."""


def read(stage: StageCost, chunk_rows: int, stages: int = 2, prompt: int = 8000) -> float:
    """Seconds in which a lone prompt is read."""
    cost = ClusterCost(stage=stage, draft=DraftCost(0.001))
    setting = Setting(
        *(Synthetic(), cost, stages, 4, prompt),
        chunk_rows=chunk_rows,
    )
    return simulate(setting, "autoregressive").stats[0]["prompt_seconds"]


def test_chunks_are_as_long_as_measured_passes_pay() -> None:
    usual = read(GPU, 0)
    # 125 passes of 64 rows, or 16 of 512 that take twice as long.
    assert read(GPU, 2048) < usual / 3
    assert read(GPU, 128) == pytest.approx(usual / 2, rel=0.1)
    # Where rows cost what they take, and where passes would be too long for others.
    dear = StageCost(pass_seconds=0.02, plateau=1, row_seconds=0.02)
    assert read(dear, 2048, prompt=500) == pytest.approx(read(dear, 0, prompt=500))
    slow = StageCost(pass_seconds=1.0, plateau=2048)
    assert read(slow, 2048) == pytest.approx(read(slow, 0))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["flowspec", "chunked"])
def test_prompts_are_read_in_pieces_where_rows_are_dear(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, free = run(policy, DEAR, 2), run(policy, FREE, 2)
    monkeypatch.setattr(PipelineCosts, "prefill_chunk_rows", lambda _, length, most, *__: most)
    whole = run(policy, DEAR, 2)
    assert first_token(found) < first_token(whole) / 1.5
    assert free == run(policy, FREE, 2)
