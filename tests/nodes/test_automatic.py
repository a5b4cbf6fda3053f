"""``auto``: which token source is taken of what there is, and that nothing makes it fail."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from asyncspec_nodes.cluster.automatic import (
    PAIRS,
    UNKNOWN,
    Choice,
    choose,
    described,
    resolved,
)
from asyncspec_nodes.cluster.checkpoints import BUNDLED_DRAFT, BUNDLED_TARGET, LOOKUPS_ALONE, parts
from asyncspec_nodes.cluster.config import Config, NodeTable, SourceTable, TargetTable

NAMED = PAIRS[0].target.rpartition("/")[2]
CONFIG = Config(TargetTable(path=str(BUNDLED_TARGET)), (NodeTable(1, "127.0.0.1", 1),))
TWIN = Choice("twin:int4+ngram", f"{UNKNOWN}, and there is memory for a twin, beside lookup")


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The bundled target under a published target's name, and an empty cache of the Hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return Path(shutil.copytree(BUNDLED_TARGET, tmp_path / NAMED))


def cached(repository: str, tmp_path: Path, model: Path) -> None:
    """``model`` as the Hub's cache holds a repository."""
    folder = tmp_path / "cache" / f"models--{repository.replace('/', '--')}"
    shutil.copytree(model, folder / "snapshots" / ("0" * 40))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)


def test_the_bundled_target_has_its_own_draft_model() -> None:
    choice = choose(str(BUNDLED_TARGET), stages_here=1.0)
    assert choice.source == f"{BUNDLED_DRAFT}+ngram"


def test_a_published_draft_is_taken_where_it_is_here(target: Path, tmp_path: Path) -> None:
    assert choose(str(target), stages_here=1.0) == TWIN
    source = PAIRS[0].sources[-1]
    cached(source, tmp_path, BUNDLED_DRAFT)
    choice = choose(str(target), stages_here=1.0)
    model, lookup = parts(choice.source)
    assert lookup == "ngram"
    assert Path(model).samefile(
        tmp_path / "cache" / f"models--{source.replace('/', '--')}" / "snapshots" / ("0" * 40)
    )
    assert choice.reason == f"{source} was published for this target, beside lookup"


def test_sources_that_do_not_fit_are_skipped(target: Path, tmp_path: Path) -> None:
    """A draft in the cache whose tokenizer is cut off."""
    cached(PAIRS[0].sources[-1], tmp_path, BUNDLED_DRAFT)
    (tokenizer,) = (tmp_path / "cache").glob("*/snapshots/*/tokenizer.json")
    tokenizer.write_text(tokenizer.read_text()[:100])
    assert choose(str(target), stages_here=1.0) == TWIN


def test_a_target_of_the_hub_is_offline(target: Path) -> None:
    """Heads would be fetched, and are not to be had."""
    assert choose(str(target), PAIRS[0].target, stages_here=1.0) == TWIN


def test_without_memory_text_is_looked_up(target: Path) -> None:
    choice = choose(str(target), stages_here=1e9)
    assert choice == Choice(LOOKUPS_ALONE, f"{UNKNOWN}, nor is there memory for a twin")


def test_targets_without_a_twin() -> None:
    for name in ("toy:", "llama:/nowhere.gguf"):
        assert choose(name, stages_here=1.0) == Choice(LOOKUPS_ALONE, UNKNOWN)


def test_several_machines_come_to_the_same_choice(target: Path, tmp_path: Path) -> None:
    cached(PAIRS[0].sources[-1], tmp_path, BUNDLED_DRAFT)
    config = replace(CONFIG, target=TargetTable(path=str(target)), source=SourceTable("a", 2))
    assert resolved(config, stages_here=0.0).draft.source == LOOKUPS_ALONE


def test_the_choice_and_its_reason_are_named() -> None:
    found = resolved(CONFIG, stages_here=1.0).draft
    assert (
        described(found)
        == "demo-draft+ngram (auto: the bundled target's draft model, beside lookup)"
    )
    assert described(replace(found, source="ngram+suffix", chosen="")) == "ngram+suffix"
    given = replace(CONFIG, draft=replace(CONFIG.draft, source="ngram"))
    assert resolved(given, stages_here=1.0) == given
