"""A node's part of a cluster file, loaded: its model, its machine, its ``Hello``."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.backend.base import (
    LoadedSource,
    LoadedStage,
    OpenModel,
    SourceSpec,
    StageSpec,
    Tensors,
    Tokenizer,
)
from asyncspec.backend.paced import Pace, Paced
from asyncspec.backend.packing_cost import packing_seconds
from asyncspec.backend.registry import backend_of, backend_of_source
from asyncspec.core.cost_model.bandwidth import ALWAYS_PACK, NEVER_PACK
from asyncspec.core.errors import UserError
from asyncspec.core.jobs import DraftResult, FeatureJob
from asyncspec.policy.registry import POLICIES
from asyncspec.sim.costs import DraftCost, StageCost
from asyncspec.source.base import TokenSource
from asyncspec.source.hybrid import HybridSource
from asyncspec.source.ngram import NGramSource
from asyncspec_nodes.cluster.chat_templates import PLAIN, read_template
from asyncspec_nodes.cluster.config import (
    NGRAM,
    NONE,
    WITHOUT_MODEL,
    Config,
    PaceTable,
    parts,
)
from asyncspec_nodes.cluster.layout import layout
from asyncspec_nodes.node.reports import Reporter
from asyncspec_nodes.node.resources import cache_budget, draft_budget
from asyncspec_nodes.roles.draft.machine import DraftMachine
from asyncspec_nodes.roles.draft.state import DraftConfig
from asyncspec_nodes.roles.source import SourceConfig, SourceMachine
from asyncspec_nodes.roles.verify.machine import VerifyMachine
from asyncspec_nodes.roles.verify.session import VerifyConfig
from asyncspec_nodes.serving.requests import ServingConfig, read_defaults
from asyncspec_protocol.ids import Rank, SessionId, first_session
from asyncspec_protocol.links import role_of
from asyncspec_protocol.messages import PROTOCOL_VERSION, Hello, Role


class Source(Struct, frozen=True):
    """A token source that can be asked."""

    run: Callable[[Any], DraftResult | None]
    abandon: Callable[[Any], None]
    drafts: bool = True
    # Held for each token of a session, and for each node of its tree; 0: nothing worth counting.
    token_bytes: int = 0
    # What it reads of the target, as in ``Open.features``, and how that comes.
    features: tuple[int, ...] = ()
    tensors: Tensors | None = None


def load_source(config: Config, target: OpenModel) -> Source:
    """What proposes tokens. Raises ``UserError``."""
    names = parts(config.draft.source)
    if names == (NONE,):
        if POLICIES[config.draft.policy].uses_draft:
            raise UserError(
                f"policy {config.draft.policy} needs a token source, but [draft] source is none; "
                "use policy autoregressive, or another source"
            )
        return Source(_no_source, _no_source, drafts=False)
    models = [_load(name, config, target) for name in names if name != NGRAM]
    lookups = [NGramSource()] if NGRAM in names else []
    reader = next((loaded for loaded in models if loaded.features), None)
    source: TokenSource
    if len(names) == 1:
        source = models[0].source if models else lookups[0]
    else:
        source = HybridSource(
            [loaded.source for loaded in models], lookups, reader.source if reader else None
        )
    return Source(
        source.run,
        source.abandon,
        token_bytes=sum(loaded.token_bytes for loaded in models),
        features=reader.features if reader else (),
        tensors=reader.tensors if reader else None,
    )


def _load(name: str, config: Config, target: OpenModel) -> LoadedSource:
    backend = backend_of_source(name, config.target.path)
    return backend.load_source(SourceSpec(name, target, config.target.dtype))


def _no_source(job: FeatureJob) -> None:
    raise AssertionError(f"no policy may ask for {type(job).__name__} here")


ELSEWHERE = Source(_no_source, _no_source)
"""On the draft node where the source is a node of its own."""


def short(name: str) -> str:
    """A source's name without the folders."""
    return "+".join(Path(part).name or part for part in name.split("+"))


# --- From a cluster file to what one node needs to serve: its model, its machine, its model_info.
# Imports torch, inside the functions: the process entry has set the thread settings before.


class Loaded(Struct, frozen=True):
    """A node that can begin to serve."""

    me: Hello
    machine: DraftMachine | VerifyMachine | SourceMachine
    initial: object
    run_job: Callable[[Any], object | None]
    abandon_job: Callable[[Any], None]
    tensors: Tensors | None = None
    # As in ``LinkOptions``.
    packing_seconds: float = NEVER_PACK
    guarantee: str = ""
    # Stages only: how the weights are kept.
    weights: str = ""
    # Threads that share a product.
    threads: int = 1
    # Draft node only: what clients' text is made of, and what they may ask for.
    codec: Tokenizer | None = None
    rules: ServingConfig | None = None


def load_node(config: Config, rank: int, reporter: Reporter) -> Loaded:
    """Load a node's part. Slow; raises ``UserError`` with what to change."""
    role = role_of(rank, config.stages)
    if role == "source":
        loaded = _load_source(config, rank, reporter)
    elif role == "draft":
        loaded = _load_draft(config, Rank(rank), reporter)
    else:
        loaded = _load_stage(config, rank, reporter)
    loaded = replace(loaded, packing_seconds=_packing_seconds(config, loaded))
    return _paced(loaded, config.pace[rank]) if rank in config.pace else loaded


def _packing_seconds(config: Config, loaded: Loaded) -> float:
    """What packing rows costs, for the sake of where it pays; measured where that decides."""
    if config.cluster.wire == "plain" or loaded.me.role != "verify":
        return NEVER_PACK
    if config.cluster.wire == "packed":
        return ALWAYS_PACK
    return packing_seconds() if loaded.me.dtype == "bfloat16" else NEVER_PACK


def _paced(loaded: Loaded, pace: PaceTable) -> Loaded:
    """The same node on a slower device."""
    first, end = loaded.me.layers
    device = Paced(
        loaded.run_job,
        loaded.abandon_job,
        Pace(
            _stage_cost(pace),
            DraftCost(pace.level_seconds, pace.call_seconds),
            layers=max(1, end - first),
        ),
    )
    return replace(loaded, run_job=device.run, abandon_job=device.abandon)


def _stage_cost(pace: PaceTable) -> StageCost:
    return StageCost(pace.seconds, pace.plateau, pace.row_seconds)


def _load_stage(config: Config, rank: int, reporter: Reporter) -> Loaded:
    target = config.target
    backend = backend_of(target.path)
    reporter.loading(backend.library)
    model = backend.open(target.path, tokenizer=False)
    layers = model.info.layers
    span = layout(config, layers)[rank - 1]
    reporter.loading(f"layers {span[0]} to {span[1] - 1} of {layers}")
    stage = backend.load(StageSpec(model, span, target.dtype, target.mode, target.quantize))
    tried = _tried(config, rank, stage)
    machine = VerifyMachine(
        VerifyConfig(
            rank=Rank(rank),
            stages=config.stages,
            window=config.limits.window,
            batch_rows=config.limits.batch_rows,
            slots=cache_budget(config, rank) // stage.cache_bytes(1),
            vocab=model.info.vocab_size,
            first_layer=span[0],
            end_layer=span[1],
            layers=layers,
            tried_rows=tuple(tried),
            tried_microseconds=tuple(round(1e6 * seconds) for seconds in tried.values()),
        )
    )
    return Loaded(
        me=_hello(config, rank, "verify", span, model),
        machine=machine,
        initial=machine.initial(),
        run_job=stage.run,
        abandon_job=stage.abandon,
        tensors=stage,
        guarantee=stage.guarantee,
        weights=stage.weights,
        threads=backend.threads(),
    )


def _tried(config: Config, rank: int, stage: LoadedStage) -> dict[int, float]:
    """By rows, the seconds that some passes of a stage take here."""
    taken = stage.pass_seconds()
    if rank in config.pace:
        pace = _stage_cost(config.pace[rank])
        taken = {rows: max(pace.seconds(rows), real) for rows, real in taken.items()}
    return taken


def _load_draft(config: Config, rank: Rank, reporter: Reporter) -> Loaded:
    backend = backend_of(config.target.path)
    reporter.loading(backend.library)
    target = backend.open(config.target.path)
    # A mistake in the layers is every node's: all of them name it at once.
    layout(config, target.info.layers)
    defaults = read_defaults(config.target.path, config.target.generation_config)
    reporter.loading("tokenizer")
    tokenizer = backend.load_tokenizer(target, read_template(config.target.chat_template))
    if config.source is None:
        reporter.loading(f"draft {short(config.draft.source)}")
        source = load_source(config, target)
    else:
        source = ELSEWHERE
    machine = DraftMachine(
        DraftConfig(
            stages=config.stages,
            source=None if config.source is None else Rank(config.stages + 1),
            # Where there may be several the file names none.
            sole=config.find(0) is not None,
            vocab=target.info.vocab_size,
            max_sessions=config.limits.sessions,
            rejoin_seconds=config.limits.rejoin_seconds,
            features=source.features,
            slots=_source_slots(config, rank, source),
            first_session=SessionId(first_session(rank) + time.time_ns() // 1_000_000),
        )
    )
    return Loaded(
        me=replace(
            _hello(config, rank, "draft", (0, 0), target),
            # ``PLAIN`` serves chats of targets that were not made for them.
            chat_template=tokenizer.has_template and config.target.chat_template != PLAIN,
        ),
        machine=machine,
        initial=machine.initial(),
        run_job=source.run,
        abandon_job=source.abandon,
        tensors=source.tensors,
        threads=backend.threads(),
        codec=tokenizer,
        rules=ServingConfig(
            context_length=target.info.context_length,
            eos=frozenset(target.info.eos_token_ids),
            policy=config.draft.policy,
            drafts=source.drafts,
            vocab=target.info.vocab_size,
            defaults=defaults,
        ),
    )


def _load_source(config: Config, rank: int, reporter: Reporter) -> Loaded:
    backend = backend_of(config.target.path)
    reporter.loading(backend.library)
    # Whoever has a draft model compares its tokenizer with the target's.
    compares = any(part not in WITHOUT_MODEL for part in parts(config.draft.source))
    target = backend.open(config.target.path, tokenizer=compares)
    reporter.loading(f"draft {short(config.draft.source)}")
    source = load_source(config, target)
    machine = SourceMachine(
        SourceConfig(
            Rank(rank),
            target.info.vocab_size,
            sessions=config.limits.sessions,
            slots=_source_slots(config, rank, source),
        )
    )
    return Loaded(
        me=_hello(config, rank, "source", (0, 0), target),
        machine=machine,
        initial=machine.initial(),
        run_job=source.run,
        abandon_job=source.abandon,
        threads=backend.threads(),
    )


def _source_slots(config: Config, rank: int, source: Source) -> int:
    """Slots there is memory for; 0: no bound, where the source holds nothing worth counting."""
    if not source.token_bytes:
        return 0
    return max(1, draft_budget(config, rank) // source.token_bytes)


def _hello(
    config: Config, rank: int, role: Role, span: tuple[int, int], target: OpenModel
) -> Hello:
    return Hello(
        protocol=PROTOCOL_VERSION,
        cluster=config.cluster.name,
        rank=Rank(rank),
        role=role,
        stages=config.stages,
        layers=span,
        dtype=target.computed_dtype(config.target.dtype),
        fingerprint=target.fingerprint,
        mode=config.target.mode,
        quantize=config.target.quantize,
    )
