"""Placement of GGUF targets: ``plan layers``, ``layers = "auto"`` and ``up`` choose stages that
llama.cpp can compute, for families that cannot be cut everywhere as well."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.backend.base import StageOptions
from asyncspec.core.errors import CheckpointError, UserError
from asyncspec.placement.model import Constraints, Device, Network, TargetCost
from asyncspec.placement.rate import throughput_rate
from asyncspec.plugins.llama import target as gguf_target
from asyncspec.plugins.llama.cut import cut, refused
from asyncspec.plugins.llama.gguf_file import GGUF, open_gguf
from asyncspec_nodes.cli.main import main
from asyncspec_nodes.cluster.config import layout
from asyncspec_nodes.cluster.file import parse
from asyncspec_nodes.cluster.placement import best_placement, target_cost, with_layers
from backend import gguf_models
from backend.gguf_models import FAMILIES, save_random
from commands import usage_error

Save = Callable[..., Path]

UNKNOWN = "smollm3"
"""A family that llama.cpp computes and stages do not."""

DEPTHS = {"gemma3": 12, "deepseek2": 27}
"""Layers where a family's rule needs more than the usual few."""


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """A small model of a family, made once."""
    made: dict[str, Path] = {}

    def path_of(family: str) -> Path:
        if family not in made:
            path = tmp_path_factory.mktemp("plans") / f"{family}.gguf"
            layers = DEPTHS.get(family, gguf_models.LAYERS)
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(FAMILIES, UNKNOWN, {"arch": UNKNOWN})
                made[family] = save_random(path, family, layers=layers)
        return made[family]

    return path_of


def every_span(layers: int) -> list[tuple[int, int]]:
    return list(combinations(range(layers + 1), 2))


def is_accepted(model: GGUF, span: tuple[int, int]) -> bool:
    try:
        cut(model, *span)
    except CheckpointError:
        return False
    return True


@pytest.mark.parametrize("family", [*FAMILIES, UNKNOWN])
def test_a_target_has_a_cost_for_each_layer(family: str, save: Save) -> None:
    path = save(family)
    target = target_cost(str(path), StageOptions(), 64)
    layers = DEPTHS.get(family, gguf_models.LAYERS)
    assert len(target.layers) == layers
    assert all(layer.weights > 0 and layer.work > 0 for layer in target.layers)
    model = open_gguf(path)
    assert {span for span in every_span(layers) if not is_accepted(model, span)} == {
        *target.refused
    }
    assert refused(model, every_span(layers)) == target.refused


def test_costs_of_layers_do_not_read_the_vocabulary_for_each(
    save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a second."""
    readings = []
    read = gguf_target.end_tokens

    def counted(model: GGUF) -> tuple[int, ...]:
        readings.append(model)
        return read(model)

    monkeypatch.setattr(gguf_target, "end_tokens", counted)
    target_cost(str(save("gemma3")), StageOptions(), 64)
    assert len(readings) <= 1


def placed(target: TargetCost, speeds: list[int], stages: int) -> list[tuple[int, int]]:
    devices = [Device(f"m{i}", 1 << 40, 1e6 * speed) for i, speed in enumerate(speeds)]
    rate = throughput_rate(8)
    found = best_placement(target, devices, Network(), rate, Constraints(stages))
    return [stage.layers for stage in found.stages]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt-oss"])
@given(speeds=st.lists(st.integers(1, 40), min_size=3, max_size=3), stages=st.integers(1, 3))
def test_planned_stages_are_accepted(
    family: str, speeds: list[int], stages: int, save: Save
) -> None:
    path = save(family)
    model = open_gguf(path)
    spans = placed(target_cost(str(path), StageOptions(), 64), speeds, stages)
    assert len(spans) == stages
    assert all(is_accepted(model, span) for span in spans)


@pytest.mark.parametrize("family", [UNKNOWN, "deepseek2"])
def test_a_family_that_cannot_be_cut_runs_on_one_machine(family: str, save: Save) -> None:
    target = target_cost(str(save(family)), StageOptions(), 64)
    assert placed(target, [1, 2], 1) == [(0, len(target.layers))]
    with pytest.raises(UserError, match=f"cannot be cut into 2 stages: .*{family}"):
        placed(target, [1, 2], 2)
    small = [Device(name, target.memory((0, len(target.layers))) - 1, 1.0) for name in "ab"]
    with pytest.raises(UserError, match=f"does not fit: .*; not every cut is possible: .*{family}"):
        best_placement(target, small, Network(), throughput_rate(1))


AUTO = 'layers = "auto"\ngb_per_second = {speed}'


def cluster(target: Path, *nodes: str, table: str = "") -> str:
    """A cluster file with a stage for each of ``nodes``, its table's last lines."""
    stages = (
        f'[[node]]\nrank = {rank}\nhost = "127.0.0.1"\nport = {7000 + rank}\n{more}\n'
        for rank, more in enumerate(nodes, start=1)
    )
    return f'[target]\npath = "{target}"\n{table}\n{"".join(stages)}'


def test_automatic_layers_of_a_cluster_file(save: Save) -> None:
    path = save("gpt-oss")
    text = cluster(path, *(AUTO.format(speed=speed) for speed in (30, 1, 20)))
    spans = layout(with_layers(parse(text)), gguf_models.LAYERS)
    model = open_gguf(path)
    assert all(is_accepted(model, span) for span in spans)


@pytest.mark.parametrize(
    ("family", "nodes", "table", "says"),
    [
        ("llama", ("",), 'quantize = "int8"', "leave quantize int8 out"),
        ("llama", ("",), 'dtype = "bfloat16"', "leave dtype bfloat16 out"),
        ("llama", ("",), '[llama]\nkv_type = "q8_0"', "kv_type q8_0 needs heads of a multiple"),
        (UNKNOWN, ("", ""), "", f"a {UNKNOWN} model cannot be cut into stages"),
        (UNKNOWN, (AUTO.format(speed=1),) * 2, "", "the target cannot be cut into 2 stages"),
        ("gpt-oss", ("layers = [0, 1]", "layers = [1, 2]", "layers = [2, 5]"), "", "none has a"),
        ("gpt-oss", (AUTO.format(speed=1),) * 4, "", "cannot be cut into 4 stages"),
        ("gpt-oss", (AUTO.format(speed=1),) * 3, "", ""),
        (UNKNOWN, ("",), "", ""),
    ],
)
def test_check_refuses_what_nodes_do(
    family: str,
    nodes: tuple[str, ...],
    table: str,
    says: str,
    save: Save,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(cluster(save(family), *nodes, table=table))
    assert main(["check", str(file)]) == (2 if says else 0)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == bool(says)
    assert says in "".join(lines)


def test_memory_of_stages_that_cannot_be(save: Save, capsys: pytest.CaptureFixture[str]) -> None:
    line = usage_error(capsys, "memory", "--target", str(save(UNKNOWN)), "--stages", "2")
    assert "cannot be cut into stages" in line
