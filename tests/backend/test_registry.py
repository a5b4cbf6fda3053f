"""The seam between nodes and backends, by the toy backend: whole clusters without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from asyncspec.backend import registry
from asyncspec.backend.base import SourceSpec, StageSpec
from asyncspec.backend.reference import decode
from asyncspec.core.errors import CheckpointError, UserError
from asyncspec.source.registry import EAGLE_PREFIX
from asyncspec_nodes.cluster.checkpoints import check_draft, check_target
from asyncspec_nodes.cluster.config import DraftTable, TargetTable
from asyncspec_nodes.local.cluster import local_config
from asyncspec_nodes.node.loading import load_node
from asyncspec_nodes.node.reports import Reporter
from effort import nightly

TARGET = "toy:layers=6,vocab=64"


def test_a_prefix_names_the_backend() -> None:
    assert registry.backend_of(TARGET) is registry.backend("toy")
    assert registry.backend_of("/models/a:b").library == "torch"
    assert registry.backend_of("org/model@main").library == "torch"
    assert registry.backend_of_source(f"{EAGLE_PREFIX}toy", TARGET) is registry.backend("toy")
    assert registry.backend_of_source("org/draft", TARGET).library == "torch"
    assert registry.backend_of_source("twin:none", TARGET) is registry.backend("toy")
    assert registry.backend_of_source("./twin", TARGET).library == "torch"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("dir/m.gguf", "llama"),
        ("M.GGUF", "llama"),
        ("llama:m.bin", "llama"),
        ("org/m-GGUF:Q8_0", "llama"),
        ("org/m-gguf@main", "llama"),
        ("org/m/sub/m-Q8_0-00001-of-00002.gguf", "llama"),
        ("org/m-gguf-old", "hf"),
        ("org/x.gguf/model", "hf"),
        ("toy:", "toy"),
    ],
)
def test_names_of_gguf_models(model: str, name: str) -> None:
    assert registry.backend_name(model) == name
    assert registry.with_backend(model, "auto") == registry.with_backend(model, name) == model
    if name == "hf":
        assert registry.with_backend(model, "llama") == f"llama:{model}"
    else:
        with pytest.raises(UserError, match="not a model of the backend hf"):
            registry.with_backend(model, "hf")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("toy:layers=x", "layers"),
        ("toy:layers=0", "at least 1"),
        ("toy:width=3", "the settings are layers, vocab, seed, attention, context"),
    ],
)
def test_a_target_that_cannot_be(name: str, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        check_target(name, 1)


@pytest.mark.parametrize(
    ("source", "target", "says"),
    [
        ("toy:top=x", TARGET, "top"),
        ("eagle:head", TARGET, "eagle:toy"),
        ("toy:", "/nowhere", "toy targets only"),
    ],
)
def test_a_source_that_cannot_be(source: str, target: str, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        check_draft(source, target)


def test_stages_continue_each_other_and_the_tokenizer_reads_what_it_writes() -> None:
    backend = registry.backend_of(TARGET)
    model = backend.open(TARGET)
    tokenizer = backend.load_tokenizer(model)
    prompt = tokenizer.encode("HELLO, STAGES?")
    assert tokenizer.decode(prompt) == "HELLO, STAGES?"
    whole = decode([backend.load(StageSpec(model, (0, 6)))], prompt, 20)
    parts = [backend.load(StageSpec(model, span)) for span in ((0, 2), (2, 3), (3, 6))]
    assert decode(parts, prompt, 20) == whole
    assert backend.load_source(SourceSpec("toy:top=0.9", model)).features == ()


@pytest.mark.parametrize("source", ["toy:", "eagle:toy", "toy:top=0.4+ngram", "twin"])
def test_every_node_of_a_toy_cluster_loads(source: str) -> None:
    config = local_config(TargetTable(path=TARGET), DraftTable(source), 2, 1)
    loaded = [load_node(config, rank, Reporter(rank, None)) for rank in range(3)]
    assert [node.me.layers for node in loaded] == [(0, 0), (0, 3), (3, 6)]
    assert len({node.me.fingerprint for node in loaded}) == 1


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("source", ["toy:", nightly("eagle:toy"), "twin+ngram"])
def test_a_cluster_of_processes(source: str) -> None:
    command = [
        *(sys.executable, "-m", "asyncspec_nodes.cli.main", "run", "--check", "--json"),
        *("--target", TARGET, "--draft", source, "--stages", "2"),
        # The default policy may draft nothing where other programs keep a source waiting.
        *("--prompt", "Once", "--max-new-tokens", "24", "--policy", "flowspec"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["check"]["equal"]
    assert answer["stats"]["drafted_nodes"] > 0


def test_a_toy_node_imports_no_tensors() -> None:
    code = (
        "import sys\n"
        "from asyncspec_nodes.cluster.config import DraftTable, TargetTable\n"
        "from asyncspec_nodes.local.cluster import local_config\n"
        "from asyncspec_nodes.node.loading import load_node\n"
        "from asyncspec_nodes.node.reports import Reporter\n"
        f"config = local_config(TargetTable(path={TARGET!r}), DraftTable('toy:'), 2, 1)\n"
        "for rank in range(3):\n"
        "    load_node(config, rank, Reporter(rank, None))\n"
        "heavy = {'torch', 'transformers', 'onnxruntime'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
