"""From a token source's name to one that can be asked. Imports torch, inside the functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from asyncspec.backend.base import Tensors
from asyncspec.errors import UserError
from asyncspec.jobs import Drafted, FeatureJob
from asyncspec.policy import POLICIES
from asyncspec.source.hybrid import HybridSource
from asyncspec.source.ngram import NGramSource
from asyncspec.source.part import Part
from asyncspec_nodes.cluster.config_tables import Config
from asyncspec_nodes.cluster.source_names import EAGLE, NGRAM, NONE, parts


class Source(Struct, frozen=True):
    """A token source that can be asked."""

    run: Callable[[Any], Drafted | None]
    abandon: Callable[[Any], None]
    drafts: bool = True
    # Held for each token of a session, and for each node of its tree; 0: nothing worth counting.
    token_bytes: int = 0
    # What it reads of the target, as in ``Open.features``, and how that comes.
    features: tuple[int, ...] = ()
    tensors: Tensors | None = None


class _Loaded(Struct, frozen=True):
    """A part of a source."""

    part: Part
    token_bytes: int
    features: tuple[int, ...] = ()
    tensors: Tensors | None = None


def load_source(config: Config, target: Any) -> Source:
    """What proposes tokens. Raises ``UserError``."""
    names = parts(config.draft.source)
    if names == (NONE,):
        if POLICIES[config.draft.policy].drafts:
            raise UserError(
                f"policy {config.draft.policy} needs a token source, but [draft] source is none; "
                "use policy autoregressive, or another source"
            )
        return Source(_no_source, _no_source, drafts=False)
    models = [_load(name, config, target) for name in names if name != NGRAM]
    lookups = [NGramSource()] if NGRAM in names else []
    reader = next((loaded for loaded in models if loaded.features), None)
    source: Part | HybridSource
    if len(names) == 1:
        source = models[0].part if models else lookups[0]
    else:
        source = HybridSource(
            [loaded.part for loaded in models], lookups, reader.part if reader else None
        )
    return Source(
        source.run,
        source.abandon,
        token_bytes=sum(loaded.token_bytes for loaded in models),
        features=reader.features if reader else (),
        tensors=reader.tensors if reader else None,
    )


def _load(name: str, config: Config, target: Any) -> _Loaded:
    if name.startswith(EAGLE):
        from asyncspec.backend.hf.eagle.source import load_eagle

        head = load_eagle(name.removeprefix(EAGLE), target, dtype=config.target.dtype)
        return _Loaded(head, head.token_bytes, head.features.wanted, head)
    from asyncspec.backend.hf.checkpoint import open_checkpoint
    from asyncspec.backend.hf.draft import load_draft
    from asyncspec.backend.hf.vocab import check_vocab

    draft = open_checkpoint(name)
    check_vocab(target.path, draft.path)
    vocab = target.facts.vocab_size
    model = load_draft(draft, dtype=config.target.dtype, vocab=vocab)
    return _Loaded(model, model.token_bytes)


def _no_source(job: FeatureJob) -> None:
    raise AssertionError(f"no policy may ask for {type(job).__name__} here")


ELSEWHERE = Source(_no_source, _no_source)
"""On the draft node where the source is a node of its own."""


def short(name: str) -> str:
    """A source's name without the folders."""
    return "+".join(Path(part).name or part for part in name.split("+"))
