"""The target itself, quantised, as its own draft model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncspec.backend.base import TWINS, LoadedSource, SourceSpec
from asyncspec.backend.reference import decode
from asyncspec.backend.registry import backend_of_source
from asyncspec.core.errors import CheckpointError
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec.plugins.hf.heads.draft_model import DraftModel
from asyncspec_protocol.ids import SessionId, Version
from asyncspec_protocol.messages import Expand, Expanded
from backend import predictable_models
from backend.probe import cut
from backend.quantized_checkpoints import PUBLISHED, publish

pytestmark = pytest.mark.torch

MakeTiny = Callable[..., Path]
PROMPT = (5, 17, 40, 3)
NEW = 120
ONE = SessionId(1)


def load(name: str, target: Path) -> LoadedSource:
    backend = backend_of_source(name, str(target))
    return backend.load_source(SourceSpec(name, open_checkpoint(target)))


def agreement(twin: DraftModel, tokens: list[int]) -> float:
    """Share of ``tokens`` that the twin holds for the likeliest, given all before."""
    fresh: tuple[int, ...] = PROMPT
    known = hits = 0
    for token in tokens:
        expanded = twin.run(Expand(ONE, Version(0), known, fresh, 1, 1, 1))
        assert isinstance(expanded, Expanded)
        hits += expanded.tokens == (token,)
        known, fresh = known + len(fresh), (token,)
    return hits / len(tokens)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "least"), [("twin:none", 0.99), ("twin:int8", 0.95), ("twin", 0.75)]
)
def test_it_proposes_what_the_target_writes(name: str, least: float, tmp_path: Path) -> None:
    target = predictable_models.save_target(tmp_path / "target")
    twin = load(name, target).source
    assert isinstance(twin, DraftModel)
    assert agreement(twin, decode(cut(open_checkpoint(target), 2), PROMPT, NEW)) >= least


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", ["llama", "llama-tied", "gemma2", "qwen3-moe-mixed"])
@pytest.mark.parametrize("name", sorted(TWINS))
def test_memory_is_as_predicted(family: str, name: str, tiny: MakeTiny) -> None:
    path = tiny(family)
    predicted = backend_of_source(name, str(path)).source_footprint(name, str(path), "auto")
    found = load(name, path)
    assert isinstance(found.source, DraftModel)
    assert found.token_bytes == predicted.slot
    assert found.source.shard.weight_bytes == pytest.approx(predicted.weights, rel=0.02)
    kept = found.source.shard.describe()
    assert (TWINS[name] in kept) == (TWINS[name] != "none"), kept


@pytest.mark.parametrize("name", ["twin", "twin:int8"])
def test_a_gguf_target_has_none(name: str) -> None:
    backend = backend_of_source(name, "m.gguf")
    spec = SourceSpec(name, None)
    for ask in (
        lambda: backend.check_source(name, "m.gguf"),
        lambda: backend.source_footprint(name, "m.gguf", "auto"),
        lambda: backend.load_source(spec),
    ):
        with pytest.raises(CheckpointError, match=r"does not quantise GGUF .*--draft FILE\.gguf"):
            ask()


@pytest.mark.parametrize(("layout", "kept"), [("awq", "int4"), ("fp8-rows", "int8")])
def test_a_target_that_is_quantised_already(
    layout: str, kept: str, tiny: MakeTiny, tmp_path: Path
) -> None:
    """Its own levels as they are; other weights are rounded."""
    source = tiny("llama", num_hidden_layers=2, intermediate_size=96)
    path, _ = publish(source, tmp_path, PUBLISHED[layout])
    backend = backend_of_source("twin", str(path))
    predicted = backend.source_footprint("twin:int8", str(path), "auto")
    twin = load("twin:int8", path).source
    assert isinstance(twin, DraftModel)
    assert twin.shard.weight_bytes == pytest.approx(predicted.weights, rel=0.02)
    assert kept in twin.shard.describe()
    wrote = decode(cut(open_checkpoint(path), 2, dtype="auto"), PROMPT, 40)
    assert agreement(twin, wrote) >= 0.8
