"""``run --check`` with a stage one of whose weights has a flipped bit: it is named."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from asyncspec_nodes.cli import main as cli
from asyncspec_nodes.cli import run
from asyncspec_nodes.cluster.config import Config, DraftTable, TargetTable
from asyncspec_nodes.cluster.file import to_toml
from asyncspec_nodes.local.cluster import LocalCluster, local_config
from nodes.background import Background
from nodes.small_target import save_small_target

pytestmark = [pytest.mark.processes, pytest.mark.torch]

WEIGHTS = "model.safetensors"
BROKEN = "model.layers.1.mlp.down_proj.weight"
SENTENCE = "computes layer 1 wrongly: a hidden state at token "


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_target(tmp_path_factory.mktemp("sound"), num_hidden_layers=3)


@pytest.fixture(scope="module")
def broken(sound: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the highest exponent bit but two of a weight flipped: a finite number."""
    path = shutil.copytree(sound, tmp_path_factory.mktemp("broken") / "target")
    tensors = load_file(path / WEIGHTS)
    weight = tensors[BROKEN].view(torch.int32)
    weight[5, 7] ^= 1 << 28
    assert math.isfinite(tensors[BROKEN][5, 7].item())
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    return path


def with_broken_stage(config: Config, rank: int, path: Path) -> Config:
    nodes = (replace(x, target=str(path) if x.rank == rank else None) for x in config.node)
    return replace(config, node=tuple(nodes))


def test_it_is_named_by_its_rank_address_and_layers(
    sound: Path, broken: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clusters: list[LocalCluster] = []

    def start(config: Config, *arguments: Any, **options: Any) -> LocalCluster:
        config = with_broken_stage(config, 2, broken)
        clusters.append(LocalCluster(config, *arguments, **options))
        return clusters[0]

    monkeypatch.setattr(run, "LocalCluster", start)
    argv = ["run", "--target", str(sound), "--draft", "ngram", "--stages", "3", "--check"]
    argv += ["--prompt", "The cat sat", "-n", "12", "--json"]
    assert cli.main(argv) == 1
    node = clusters[0].config.at(2)
    check = json.loads(capsys.readouterr().out)["check"]
    (sentence,) = check["wrong_stages"]
    assert sentence.startswith(f"stage 2 at {node.host}:{node.port} {SENTENCE}")


def test_also_of_a_running_cluster_by_its_file(
    sound: Path, broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = local_config(TargetTable(path=str(sound)), DraftTable(source="ngram"), 3, 1)
    background = Background(with_broken_stage(config, 2, broken))
    try:
        running = with_broken_stage(background.cluster.config, 2, sound)
        file = tmp_path / "cluster.toml"
        file.write_text(to_toml(running))
        argv = ["run", "--config", str(file), "--check", "--prompt", "The cat sat", "-n", "12"]
        assert cli.main(argv) == 1
        node = running.at(2)
        lines = capsys.readouterr().err.splitlines()
        (named,) = (line for line in lines if "wrongly" in line)
        assert named.startswith(f"stage 2 at {node.host}:{node.port} {SENTENCE}")
    finally:
        background.close()
