"""Models on the Hub: every node fetches what it reads and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import close_session, constants

from asyncspec.core.errors import CheckpointError
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec.plugins.hf.checkpoint.files.headers import EMBEDDING, HEAD, INDEX, SINGLE
from asyncspec.plugins.hf.kernels.cpu.capabilities import KernelSettings
from asyncspec.plugins.hf.model.shard import load_shard
from asyncspec_nodes.cli import main as cli
from asyncspec_nodes.cluster.config import DraftTable, TargetTable
from asyncspec_nodes.local.cluster import local_config
from asyncspec_nodes.node import listen
from asyncspec_nodes.node.loading import load_node
from asyncspec_nodes.node.reports import Reporter
from hub.fake_hub import FakeHub
from nodes.small_target import TOKENIZER, save_small_target

pytestmark = [pytest.mark.processes, pytest.mark.torch]

LAYERS = 4
MODEL = "org/model"
DESCRIPTION = {"config.json", "generation_config.json", INDEX}
NORM = "model.norm.weight"


def save(path: Path, *, tied: bool, shards: str) -> Path:
    save_small_target(
        path,
        shards=shards,
        num_hidden_layers=LAYERS,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
    )
    (path / "README.md").write_text("never read")
    return path


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose embedding, head and layers lie in files of their own."""
    path = save(tmp_path_factory.mktemp("sharded"), tied=False, shards="130KB")
    assert len(list(path.glob("*.safetensors"))) >= LAYERS + 2
    return path


class Machine:
    """This process as a machine with a cache of its own, which asks a fake Hub."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache: Path
    ) -> None:
        self._patch = monkeypatch
        self._capsys = capsys
        self._cache = cache

    def use(self, hub: FakeHub, cache: str = "cache", *, offline: bool = False) -> None:
        """Settings that huggingface_hub reads of the environment when it is imported."""
        settings = {
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(self._cache / cache / "hub"),
            "HF_ASSETS_CACHE": str(self._cache / cache / "assets"),
            "HF_HUB_OFFLINE": offline,
        }
        for name, value in settings.items():
            self._patch.setattr(constants, name, value)
        close_session()  # one that was opened in the other mode keeps to it

    def command(self, *argv: str) -> tuple[int, str, str]:
        """Exit code and both outputs."""
        self._capsys.readouterr()
        code = cli.main(argv)
        out, err = self._capsys.readouterr()
        return code, out, err

    def open(self, name: str | Path, first: int = 0, last: int = 0) -> str:
        """Open a model and load layers [first, last) of it, if any, as a stage does, else as a
        draft node does. Its fingerprint; nothing is printed."""
        self._capsys.readouterr()
        checkpoint = open_checkpoint(name, tokenizer=not last)
        if last:
            load_shard(checkpoint, first, last, torch.float32, "exact", KernelSettings())
        assert self._capsys.readouterr() == ("", "")
        return checkpoint.fingerprint


@pytest.fixture
def machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Machine]:
    yield Machine(monkeypatch, capsys, tmp_path)
    close_session()


@pytest.fixture
def hub(sharded: Path, machine: Machine) -> Iterator[FakeHub]:
    with FakeHub({MODEL: sharded, "org/gated": sharded}, gated=("org/gated",)) as hub:
        machine.use(hub)
        yield hub


def files_of(path: Path, *wanted: str) -> set[str]:
    """The files with the tensors whose names begin so."""
    weight_map: dict[str, str] = json.loads((path / INDEX).read_text())["weight_map"]
    return {file for name, file in weight_map.items() if name.startswith(wanted)}


def weights(names: set[str]) -> set[str]:
    return {name for name in names if name.endswith(".safetensors")}


def layers(*numbers: int) -> tuple[str, ...]:
    return tuple(f"model.layers.{i}." for i in numbers)


def test_memory_fetches_no_weights(hub: FakeHub, machine: Machine, sharded: Path) -> None:
    argv = ("--stages", "2", "--json", "--draft")
    code, out, err = machine.command("memory", "--target", MODEL, *argv, MODEL)
    assert (code, err) == (0, "")
    assert hub.downloads() == DESCRIPTION
    assert hub.headers() == weights({file.name for file in sharded.iterdir()})
    local = machine.command("memory", "--target", str(sharded), *argv, str(sharded))
    assert out == local[1]
    # What is known is not asked for again, and needs no network.
    hub.log.clear()
    machine.use(hub, offline=True)
    assert machine.command("memory", "--target", MODEL, *argv, MODEL) == (0, out, "")
    assert hub.log == []


def test_nodes_fetch_their_own_layers_and_agree(
    hub: FakeHub, machine: Machine, sharded: Path
) -> None:
    wanted = {
        (0, 1): files_of(sharded, EMBEDDING, *layers(0)),
        (1, 3): files_of(sharded, *layers(1, 2)),
        (3, 4): files_of(sharded, NORM, HEAD, *layers(3)),
        # A draft node: no weights, but the tokenizer.
        (0, 0): set(TOKENIZER),
    }
    found = set()
    for i, (span, files) in enumerate(wanted.items()):
        hub.log.clear()
        machine.use(hub, f"machine {i}")
        found.add(machine.open(MODEL, *span))
        assert hub.downloads() == DESCRIPTION | files
    found.add(machine.open(f"{MODEL}@main", 0, LAYERS))
    assert len(found) == 1
    assert machine.open(sharded) not in found


@pytest.mark.parametrize("shards", ["130KB", "1GB"])
def test_a_tied_head(machine: Machine, tmp_path: Path, shards: str) -> None:
    model = save(tmp_path / "model", tied=True, shards=shards)
    with FakeHub({MODEL: model}) as hub:
        machine.use(hub)
        fingerprint = machine.open(MODEL)
        assert weights(hub.downloads()) == set()
        assert machine.open(MODEL, 2, 4) == fingerprint
    whole = {SINGLE} if shards == "1GB" else files_of(model, EMBEDDING, NORM, *layers(2, 3))
    assert weights(hub.downloads()) == whole


def test_a_part_that_is_cached_serves_without_a_network(hub: FakeHub, machine: Machine) -> None:
    fingerprint = machine.open(MODEL, 1, 3)
    hub.stop()
    assert machine.open(MODEL, 1, 3) == fingerprint
    machine.use(hub, offline=True)
    assert machine.open(MODEL, 1, 3) == fingerprint
    with pytest.raises(CheckpointError, match=r"^not all that is needed of org/model@"):
        machine.open(MODEL, 0, 1)


def test_a_whole_snapshot_of_another_program_serves_offline(hub: FakeHub, machine: Machine) -> None:
    huggingface_hub.snapshot_download(MODEL, cache_dir=constants.HF_HUB_CACHE)
    machine.use(hub, offline=True)
    whole = machine.open(MODEL, 1, 3)
    machine.use(hub, "other")
    assert machine.open(MODEL) == whole


def test_weights_that_are_pickled(machine: Machine, tmp_path: Path, sharded: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", *TOKENIZER):
        shutil.copy(sharded / name, model)
    (model / "pytorch_model.bin").write_bytes(b"x")
    with FakeHub({MODEL: model}) as hub:
        machine.use(hub)
        with pytest.raises(CheckpointError, match=r"org/model has its weights as pytorch_model"):
            machine.open(MODEL)


@pytest.mark.parametrize("name", ["memory", "run", "serve"])
@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("org/none", "org/none is neither a local directory nor a model the Hub shows to you"),
        ("org/gated", "org/gated is gated: accept its terms at http://127.0.0.1:"),
        (f"{MODEL}@v9", "org/model has no revision 'v9'; correct it"),
        ("a b/c", "a b/c is neither a local directory nor a Hub id; correct it"),
        ("a/b/c", "there is no directory a/b/c"),
    ],
)
def test_missing_models_are_reported(
    hub: FakeHub, machine: Machine, name: str, target: str, says: str
) -> None:
    code, out, err = machine.command(name, "--target", target)
    assert (code, out) == (2, "")
    assert err.startswith(f"asyncspec: {says}")
    assert err.count("\n") == 1


def test_no_network(hub: FakeHub, machine: Machine) -> None:
    hub.stop()
    code, out, err = machine.command("memory", "--target", MODEL)
    assert (code, out) == (2, "")
    assert err.startswith(f"asyncspec: {MODEL} is not a local directory, and fetching it from http")
    assert "Connection refused" in err
    assert err.count("\n") == 1
    machine.use(hub, offline=True)
    code, out, err = machine.command("memory", "--target", MODEL)
    assert (code, out) == (2, "")
    assert err.startswith(f"asyncspec: not all that is needed of {MODEL} is in the cache")
    assert err.count("\n") == 1


def test_too_many_stages_are_said_before_weights_are_fetched(
    hub: FakeHub, machine: Machine
) -> None:
    code, _, err = machine.command("run", "--target", MODEL, "--stages", "9", "--prompt", "a")
    assert (code, err.count("\n")) == (2, 1)
    assert weights(hub.downloads()) == set()


def test_up_leaves_the_download_to_those_who_join(
    hub: FakeHub, machine: Machine, tmp_path: Path
) -> None:
    argv = ("--target", MODEL, "--machines", "2", "--wait", "1", "--no-stage", "--port", "0")
    code, _, err = machine.command("up", *argv, "--token-file", str(tmp_path / "up.json"))
    assert code == 1
    assert "0 of 2 machines have joined within 1 s" in err
    assert weights(hub.downloads()) == set()


def environment(hub: FakeHub, home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return {**kept, "HF_ENDPOINT": hub.url, "HF_HOME": str(home)}


def held_by_nodes(path: Path) -> list[set[str]]:
    """The files that the draft node and two stages of the model at ``path`` fetch."""
    return [
        DESCRIPTION | {*TOKENIZER},
        DESCRIPTION | files_of(path, EMBEDDING, *layers(0, 1)),
        # The last stage reads the vocabulary for grammars.
        DESCRIPTION | {*TOKENIZER} | files_of(path, NORM, HEAD, *layers(2, 3)),
    ]


def test_nodes_of_a_cluster_file_fetch_what_is_theirs(
    hub: FakeHub, machine: Machine, sharded: Path
) -> None:
    config = local_config(TargetTable(path=f"{MODEL}@main"), DraftTable(source="ngram"), 2, 1)
    for rank, held in enumerate(held_by_nodes(sharded)):
        hub.log.clear()
        machine.use(hub, f"home-{rank}")
        load_node(config, rank, Reporter(rank, None))
        assert hub.downloads() == held


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_cluster_of_machines_with_caches_of_their_own(
    hub: FakeHub, machine: Machine, tmp_path: Path, sharded: Path
) -> None:
    # They listen before the nodes have loaded: whoever connects waits.
    sockets = [listen.loopback() for _ in range(3)]
    ports = [sock.getsockname()[1] for sock in sockets]
    nodes = "".join(
        f'[[node]]\nrank = {rank}\nhost = "127.0.0.1"\nport = {port}\n'
        for rank, port in enumerate(ports)
    )
    file = tmp_path / "cluster.toml"
    file.write_text(f'[target]\npath = "{MODEL}@main"\n[draft]\nsource = "ngram"\n{nodes}')
    asked = ("--prompt", "Once upon a time", "--max-new-tokens", "12", "--json")
    with ExitStack() as stack:
        for rank, role in enumerate(("draft", "verify", "verify")):
            fd = stack.enter_context(sockets[rank]).fileno()
            argv = ("--role", role, "--rank", str(rank), "--config", str(file))
            node = subprocess.Popen(
                [sys.executable, "-m", "asyncspec_nodes.node.cli", *argv, "--listen-fd", str(fd)],
                pass_fds=(fd,),
                env=environment(hub, tmp_path / f"home-{rank}"),
                stdout=subprocess.DEVNULL,
                stderr=stack.enter_context((tmp_path / f"log-{rank}").open("w")),
            )
            stack.callback(node.wait)
            stack.callback(node.terminate)
        answer = reported(machine, "--connect", f"127.0.0.1:{ports[0]}", *asked)
    _, out, _ = machine.command("run", "--target", str(sharded), *asked)
    assert answer["token_ids"] == json.loads(out)["token_ids"]
    held = [
        {f.name for f in next((tmp_path / f"home-{rank}/hub").glob("*/snapshots/*")).iterdir()}
        for rank in range(3)
    ]
    assert held == held_by_nodes(sharded)


def reported(machine: Machine, *argv: str) -> dict[str, Any]:
    """The answer, as soon as the cluster has loaded."""
    for _ in range(12):
        code, out, err = machine.command("run", *argv)
        if code == 0:
            found: dict[str, Any] = json.loads(out)
            return found
        assert "may still be loading" in err, err
    raise AssertionError(err)
