"""A GGUF draft model for a checkpoint, and a checkpoint for a GGUF target: each proposes what it
does for its own kind, and the text is the target's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncspec.backend.base import Backend, EngineOptions, LoadedSource, SourceSpec
from asyncspec.backend.reference import decode
from asyncspec.backend.registry import backend_of, backend_of_source
from asyncspec.core.errors import CheckpointError, UserError
from asyncspec.core.sampling import Sampling
from asyncspec.plugins.llama import library
from asyncspec.source.by_text import TextSource
from asyncspec_nodes.cluster.checkpoints import BUNDLED_DRAFT, BUNDLED_TARGET, check_draft
from backend.gguf_models import LoadedGGUF, convert
from backend.hf_cluster import Loaded
from backend.stage_cluster import LoadedTarget, StageCluster
from backend.test_draft_by_text import renumbered, tree
from cluster import ask
from commands import json_output
from costs import UnitCosts

pytestmark = pytest.mark.torch

TEXT = "Once upon a time there was an old woman who said to the"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the bundled pair as GGUF files, and the draft model with its tokens in another order in
    both formats."""
    folder = tmp_path_factory.mktemp("models")
    convert(BUNDLED_TARGET, folder / "target.gguf", "F32")
    convert(BUNDLED_DRAFT, folder / "draft.gguf", "F32")
    convert(renumbered(folder / "other"), folder / "other.gguf", "F32")
    return folder


def load(name: str, target: str) -> LoadedSource:
    """As a draft node does."""
    name, theirs = check_draft(name, target), backend_of(target)
    spec = SourceSpec(name, theirs.open(target), "auto", target_backend=theirs)
    return backend_of_source(name, target).load_source(spec)


def loaded(target: str) -> LoadedTarget[Any]:
    opened: Any = backend_of(target).open(target)
    return LoadedGGUF(opened) if target.endswith(".gguf") else Loaded(opened)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("target", [str(BUNDLED_TARGET), "target.gguf"])
@pytest.mark.parametrize(("draft", "by_text"), [("draft", False), ("other", True)])
def test_it_proposes_what_it_does_for_its_own_kind(
    folder: Path, target: str, draft: str, by_text: bool
) -> None:
    target = str(folder / target)
    names = [str(folder / f"{draft}.gguf"), str(folder / draft if by_text else BUNDLED_DRAFT)]
    sources = [load(name, target).source for name in names]
    assert [isinstance(source, TextSource) for source in sources] == [by_text] * 2
    prompt = tuple(tokenizer(target).encode(TEXT))
    gguf, checkpoint = (tree(source, prompt) for source in sources)
    assert (gguf.parents, gguf.tokens) == (checkpoint.parents, checkpoint.tokens)
    assert gguf.scores == pytest.approx(checkpoint.scores, abs=1e-2)


def tokenizer(target: str) -> Any:
    backend: Backend = backend_of(target)
    return backend.load_tokenizer(backend.open(target))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("target", "draft"),
    [
        (str(BUNDLED_TARGET), "draft.gguf"),
        (str(BUNDLED_TARGET), "other.gguf"),
        ("target.gguf", str(BUNDLED_DRAFT)),
        ("target.gguf", "other"),
    ],
)
def test_the_text_is_the_targets_own(
    folder: Path, target: str, draft: str, temperature: float
) -> None:
    target = str(folder / target)
    stages, sampling = loaded(target), Sampling(temperature=temperature, seed=4)
    cluster = StageCluster(UnitCosts(), stages, load(str(folder / draft), target), stages=2)
    prompt = tuple(tokenizer(target).encode("Question: Tom has 3 apples."))
    policies = ("flow", "specpipe")
    for number, policy in enumerate(policies):
        request = ask(number, prompt=prompt, max_new_tokens=20, policy=policy, sampling=sampling)
        cluster.submit(request)
    cluster.world.run(until=100_000.0)
    want = decode(stages.cut(1), prompt, 20, sampling=sampling)
    assert [*cluster.world.tokens.values()] == [want] * len(policies)


def test_its_library_may_not_have_the_targets_device(folder: Path) -> None:
    """[target] device names what the target's library calls so; the draft model is on the CPU."""
    for target, draft, device in (
        (BUNDLED_TARGET, folder / "draft.gguf", "xpu"),
        (folder / "target.gguf", BUNDLED_DRAFT, "vulkan"),
    ):
        theirs, own = backend_of(str(target)), backend_of(str(draft))
        options = EngineOptions(device=device)
        spec = SourceSpec(str(draft), theirs.open(str(target)), "auto", options, theirs)
        with pytest.raises(UserError, match=f"device {device}"):
            own.device_name(device)
        source = own.load_source(spec)
        assert source.device == "cpu"
        predicted = own.source_footprint(str(draft), str(target), "auto", device)
        assert source.token_bytes == predicted.slot


def test_a_vocabulary_that_cannot_be_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": []}')
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        backend_of("").token_names(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"drafts for toy:.*use its own kind"):
        check_draft(str(folder / "draft.gguf"), "toy:")


def test_a_gguf_draft_needs_llama_cpp(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise library.missing()

    monkeypatch.setattr(library, "import_bindings", missing)
    with pytest.raises(UserError, match=r"llama\.cpp is not installed"):
        check_draft(str(folder / "draft.gguf"), str(BUNDLED_TARGET))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("target", "draft"),
    [(str(BUNDLED_TARGET), "draft.gguf"), ("target.gguf", str(BUNDLED_DRAFT))],
)
def test_run_and_check(
    folder: Path, target: str, draft: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["run", "--target", str(folder / target), "--draft", f"{folder / draft}+ngram"]
    argv += ["--no-chat", "--prompt", TEXT, "--max-new-tokens", "24", "--stages", "2"]
    got = json_output(capsys, *argv, "--policy", "flowspec", "--check", "--json")
    assert got["check"]["equal"]
    assert got["stats"]["hits"] > 0
