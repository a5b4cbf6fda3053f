"""``asyncspec models``, and models by their short names."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec_nodes.cli import main as cli
from asyncspec_nodes.cluster.automatic import PAIRS
from asyncspec_nodes.cluster.named_models import NAMED_MODELS, NamedModel, named, target_of
from asyncspec_nodes.plugins.preflight.models_command import NODE_BYTES, fits, memory_of
from asyncspec_protocol.messages import Status

SIZES = st.floats(0, 1e12)


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [line["name"] for line in listed] == [model.name for model in NAMED_MODELS]
    assert cli.main(["models", "--machines", "9"]) == 0
    assert "qwen3-32b" in capsys.readouterr().out


def test_names_are_ids_and_others_stay_what_they_are() -> None:
    assert target_of("Qwen3-8B") == "Qwen/Qwen3-8B"
    assert target_of("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    model = named("qwen3-8b")
    assert model is not None
    assert model.drafts == PAIRS[0].sources


@given(st.lists(SIZES, min_size=1, max_size=5), st.floats(1e6, 1e12))
def test_more_memory_never_fits_less(machines: list[float], weights: float) -> None:
    ranks = ("no", "in int4 on", "in int4", "yes")
    model = NamedModel("x", "x", weights)

    def rank(free: list[float]) -> int:
        text = fits(model, free)
        return max(i for i, start in enumerate(ranks) if text.startswith(start))

    assert rank(machines) <= rank([free + 1e9 for free in machines])
    assert fits(model, [2 * weights + NODE_BYTES + 1e3]) == "yes"


def test_a_clusters_memory_is_what_is_free_and_what_it_holds() -> None:
    def status(rank: int, host: str, free: int, held: int) -> Status:
        return Status(
            0, rank, "verify", (0, 1), 1.0, 0.0, held, 0, 0, 0, host=host, free_bytes=free
        )

    nodes = [status(1, "a", 5, 1), status(2, "a", 5, 2), status(3, "b", 7, 4)]
    assert memory_of(nodes) == [8.0, 11.0]
