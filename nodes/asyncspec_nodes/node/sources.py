"""What drafts on a node, loaded: token sources, and grammars over a target's vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from asyncspec.backend.base import (
    CPU,
    Backend,
    DeviceMemory,
    LoadedSource,
    OpenModel,
    SourceSpec,
)
from asyncspec.backend.registry import backend_of, backend_of_source
from asyncspec.backend.tokenizer import Tokenizer
from asyncspec.constraint.grammar import Grammars, Vocabulary
from asyncspec.constraint.source import ConstrainedSource
from asyncspec.core.errors import UserError
from asyncspec.core.jobs import TensorRows
from asyncspec.core.tensors import Tensors, UnreadTensor, WireTensor
from asyncspec.policy.registry import POLICIES
from asyncspec.source.hybrid import HybridSource
from asyncspec.source.ngram import NGramSource
from asyncspec.source.registry import SourceKind, kind_of, make_source, needs_backend
from asyncspec_nodes.cluster.automatic import source_name
from asyncspec_nodes.cluster.checkpoints import NONE, check_learning, parts
from asyncspec_nodes.cluster.config import Config
from asyncspec_nodes.node.learning import HeadLearning
from asyncspec_nodes.node.reports import Reporter
from asyncspec_nodes.node.resources import cache_budget
from asyncspec_protocol.ids import DRAFT

IDLE = LoadedSource(NGramSource())
"""Placeholder for nodes whose machine sends no draft requests to its device."""


def load_source(
    config: Config, target: OpenModel, rank: int = DRAFT, learning: HeadLearning | None = None
) -> LoadedSource:
    """The source that ``[draft]`` names, on a node, whose head goes on ``learning``. Raises
    ``UserError``."""
    names = parts(config.draft.source)
    if learning is not None:
        check_learning(config.draft.source)
    if names == (NONE,):
        if POLICIES[config.draft.policy].uses_draft:
            raise UserError(
                f"policy {config.draft.policy} needs a token source, but [draft] source is none; "
                "use policy autoregressive, or another source"
            )
        return IDLE
    models: list[LoadedSource] = []
    for name in filter(needs_backend, names):
        backend = backend_of_source(name, config.target.path)
        theirs = backend_of(config.target.path)
        spec = SourceSpec(name, target, config.target.dtype, config.engine_of(rank), theirs)
        loaded = backend.load_source(spec)
        if learning is not None and kind_of(name).reads_features:
            loaded = learning.wrap(backend, spec, loaded)
        models.append(loaded)
    bases = [loaded.source for loaded in models]
    lookups = [make_source(name) for name in names if not needs_backend(name)]
    reader = next((loaded for loaded in models if loaded.features), None)
    if not bases:
        bases, lookups = lookups[:1], lookups[1:]
    source = bases[0]
    if len(names) > 1:
        source = HybridSource(bases, lookups, reader.source if reader else None)
    return LoadedSource(
        source,
        sum(loaded.token_bytes for loaded in models)
        + sum(kind_of(name).token_bytes for name in names),
        reader.features if reader else (),
        reader.tensors if reader else None,
        sum(loaded.session_bytes for loaded in models),
        min((loaded.usable for loaded in models if loaded.usable is not None), default=None),
        # They have one device, or compute in the host's memory.
        *_device_of(models),
    )


def source_kinds(config: Config) -> list[SourceKind]:
    """The kinds of the sources that ``[draft]`` names."""
    return [kind_of(part) for part in parts(config.draft.source)]


def _device_of(
    models: Sequence[LoadedSource],
) -> tuple[str, Callable[[], DeviceMemory | None]]:
    placed = next((placed for placed in models if placed.device != CPU), IDLE)
    return placed.device, placed.device_memory


def grammars(
    backend: Backend,
    model: OpenModel,
    tokenizer: Tokenizer | None = None,
    *,
    bounded: bool = False,
) -> Grammars:
    """Those over a target's vocabulary, which is read when the first of them comes. ``bounded``:
    they come from users, and have not been compiled before."""

    def read() -> Vocabulary:
        spelling = tokenizer or backend.load_tokenizer(model)
        tokens, eos = range(model.info.vocab_size), model.info.eos_token_ids
        special = {*filter(spelling.is_special, tokens), *eos}
        return Vocabulary([*map(spelling.spell, tokens)], special, eos)

    return Grammars(read, bounded=bounded)


def constrained(source: LoadedSource, compiled: Grammars) -> LoadedSource:
    """A source that proposes what a session's grammar allows."""
    return replace(source, source=ConstrainedSource(source.source, lambda: compiled))


def features_passed_on(config: Config, target: OpenModel, backend: Backend) -> LoadedSource:
    """What a draft node has in place of a token source on a node of its own."""
    if not any(kind.reads_features for kind in source_kinds(config)):
        return IDLE
    return LoadedSource(IDLE.source, tensors=backend.feature_tensors(target, config.target.dtype))


class PassedOn:
    """A draft node's ``Tensors``: what its token source cannot read is passed on to a client.

    Arguments:
        source: reads what comes for the token source; None where it reads nothing.
    """

    def __init__(self, source: Tensors | None) -> None:
        self._source = source

    def pack(self, rows: TensorRows) -> WireTensor:
        if not isinstance(rows.handle, UnreadTensor):
            assert self._source is not None
            return self._source.pack(rows)
        tensor = rows.handle.tensor
        size = tensor.data.nbytes // tensor.shape[0]
        parts = [tensor.data[row * size : (row + 1) * size] for row in rows.rows]
        shape = (len(rows.rows), *tensor.shape[1:])
        return WireTensor(tensor.dtype, shape, memoryview(b"".join(parts)))

    def unpack(self, tensor: WireTensor) -> object:
        why = "the token source reads no features"
        if self._source is not None:
            try:
                return self._source.unpack(tensor)
            except ValueError as error:
                why = str(error)
        # The link's buffer is used again.
        return UnreadTensor(replace(tensor, data=memoryview(bytes(tensor.data))), why)


def report_and_load(
    config: Config,
    rank: int,
    target: OpenModel,
    reporter: Reporter,
    learning: HeadLearning | None = None,
) -> LoadedSource:
    """``load_source``, and a report of what is loaded, without the folders. Raises
    ``UserError``."""
    reporter.loading(f"draft {source_name(config.draft)}")
    return load_source(config, target, rank, learning)


def source_slots(config: Config, rank: int, source: LoadedSource) -> int:
    """Slots there is memory for; 0: no bound, where the source holds next to nothing."""
    budget = cache_budget(config, rank, source.device_memory())
    budget -= config.limits.sessions * source.session_bytes
    return max(1, budget // source.token_bytes) if source.token_bytes else 0
