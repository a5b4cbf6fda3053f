"""``bench tensor-parallel``: its formula, and both kinds' text against ``generate``."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.bench.__main__ import main
from tools.bench.report.costs import JETSON_7B, tensor_parallel
from tools.bench.tensor_parallel.cost import (
    KINDS,
    Kind,
    Link,
    Model,
    fitted_compute,
    pass_seconds,
    tile_rows,
)

counts = st.integers(1, 64)
models = st.builds(Model, counts, st.just(8192), st.integers(2, 8))
kinds = st.sampled_from(KINDS)


@given(kinds, models, counts)
def test_without_a_wire_all_that_is_left_is_the_products(
    kind: Kind, model: Model, tiles: int
) -> None:
    rows = tiles * model.devices
    assert math.isclose(pass_seconds(kind, model, rows, 3.0, Link()), 3.0)


@given(models, counts, st.floats(0, 0.1), st.floats(1e6, 1e9))
def test_rings_that_overlap_are_never_slower(
    model: Model, tiles: int, latency: float, bandwidth: float
) -> None:
    link, rows = Link(latency, bandwidth), tiles * model.devices
    megatron, galaxy = (pass_seconds(kind, model, rows, 1.0, link) for kind in KINDS)
    wires = pass_seconds("megatron", model, rows, 0.0, link)
    assert max(1.0, wires) <= galaxy * (1 + 1e-9)
    assert galaxy <= megatron * (1 + 1e-9)


@given(kinds, models, counts, st.floats(1e-3, 10), st.floats(0, 0.1), st.floats(1e6, 1e9))
def test_what_a_pass_takes_beside_the_link_is_found_again(
    kind: Kind, model: Model, rows: int, compute: float, latency: float, bandwidth: float
) -> None:
    link = Link(latency, bandwidth)
    seconds = pass_seconds(kind, model, rows, compute, link)
    fitted = fitted_compute(kind, model, rows, seconds, link)
    assert math.isclose(pass_seconds(kind, model, rows, fitted, link), seconds, rel_tol=1e-6)


@given(counts, st.integers(1, 16))
def test_tiles_are_all_rows(rows: int, devices: int) -> None:
    tiles = tile_rows(rows, devices)
    assert sum(tiles) == rows
    assert tiles[0] - tiles[-1] <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_simulator_has_the_formula(kind: Kind) -> None:
    cost = tensor_parallel(JETSON_7B, kind, 4, 32)
    model, link = Model(32, 8192, 4), Link(cost.wire.latency, cost.wire.bandwidth)
    for rows in (4, 32, 80):
        products = cost.stage.seconds(rows)
        exact = pass_seconds(kind, model, rows, products, link)
        assert math.isclose(cost.pass_seconds(1, rows), exact, rel_tol=0.05)  # type: ignore[arg-type]


def test_both_kinds_write_the_text_of_generate(capsys: Any) -> None:
    words = "tensor-parallel --devices 2 --mbit 1000 --latency-ms 0 --layer-ms 0 --hidden 64"
    words += " --layers 2 --tokens 4 --rows 1 3 --network loopback --json"
    assert main(words.split()) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["kind"], row["text"]) for row in rows] == [(kind, "equal") for kind in KINDS]
