"""From a token source's name to one that can be asked. Imports torch, inside the functions."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.backend.base import Tensors
from asyncspec.backend.paced import Pace, Paced
from asyncspec.backend.packing_cost import packing_seconds
from asyncspec.core.cost_model.bandwidth import ALWAYS_PACK, NEVER_PACK
from asyncspec.core.errors import UserError
from asyncspec.core.jobs import Drafted, FeatureJob
from asyncspec.policy import POLICIES
from asyncspec.sim.costs import DraftCost, StageCost
from asyncspec.source.hybrid import HybridSource, Part
from asyncspec.source.ngram import NGramSource
from asyncspec_nodes.cluster.chat_templates import PLAIN, read_template
from asyncspec_nodes.cluster.config import (
    EAGLE,
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
from asyncspec_nodes.roles.verify.state import VerifyConfig
from asyncspec_nodes.serving.requests import Rules, read_defaults
from asyncspec_nodes.serving.service import TextCodec
from asyncspec_protocol.handshake import role_of
from asyncspec_protocol.ids import Rank, SessionId, first_session
from asyncspec_protocol.messages import PROTOCOL_VERSION, Hello, Role


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
    from asyncspec.backend.hf.draft_model import load_draft
    from asyncspec.backend.hf.families import check_vocab

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


# --- From a cluster file to what one node needs to serve: its model, its machine, its facts.
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
    # Draft node only: what clients' text is made of, and what they may ask for.
    codec: TextCodec | None = None
    rules: Rules | None = None


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
    reporter.loading("torch")
    from asyncspec.backend.hf.checkpoint import open_checkpoint
    from asyncspec.backend.hf.stage import load_stage

    checkpoint = open_checkpoint(config.target.path, tokenizer=False)
    span = layout(config, checkpoint.facts.layers)[rank - 1]
    reporter.loading(f"layers {span[0]} to {span[1] - 1} of {checkpoint.facts.layers}")
    target = config.target
    stage = load_stage(
        checkpoint, *span, dtype=target.dtype, mode=target.mode, quantize=target.quantize
    )
    tried = _tried(config, rank, stage)
    machine = VerifyMachine(
        VerifyConfig(
            rank=Rank(rank),
            stages=config.stages,
            window=config.limits.window,
            batch_rows=config.limits.batch_rows,
            slots=cache_budget(config, rank) // stage.cache_bytes(1),
            vocab=checkpoint.facts.vocab_size,
            first_layer=span[0],
            end_layer=span[1],
            layers=checkpoint.facts.layers,
            tried_rows=tuple(tried),
            tried_microseconds=tuple(round(1e6 * seconds) for seconds in tried.values()),
        )
    )
    return Loaded(
        me=_hello(config, rank, "verify", span, checkpoint),
        machine=machine,
        initial=machine.initial(),
        run_job=stage.run,
        abandon_job=stage.abandon,
        tensors=stage,
        guarantee=stage.guarantee,
        weights=stage.shard.in_words(),
    )


def _tried(config: Config, rank: int, stage: Any) -> dict[int, float]:
    """By rows, the seconds that some passes of an ``HFStage`` take here."""
    from asyncspec.backend.hf.stage import pass_seconds

    taken = pass_seconds(stage)
    if rank in config.pace:
        pace = _stage_cost(config.pace[rank])
        taken = {rows: max(pace.seconds(rows), real) for rows, real in taken.items()}
    return taken


def _load_draft(config: Config, rank: Rank, reporter: Reporter) -> Loaded:
    reporter.loading("torch")
    from asyncspec.backend.hf.checkpoint import open_checkpoint
    from asyncspec.backend.hf.tokenizer import load_tokenizer

    target = open_checkpoint(config.target.path)
    # A mistake in the layers is every node's: all of them name it at once.
    layout(config, target.facts.layers)
    defaults = read_defaults(target.path, config.target.generation_config)
    reporter.loading("tokenizer")
    tokenizer = load_tokenizer(target.path, read_template(config.target.chat_template))
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
            vocab=target.facts.vocab_size,
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
        codec=tokenizer,
        rules=Rules(
            context_length=target.facts.context_length,
            eos=frozenset(target.facts.eos_token_ids),
            policy=config.draft.policy,
            drafts=source.drafts,
            vocab=target.facts.vocab_size,
            defaults=defaults,
        ),
    )


def _load_source(config: Config, rank: int, reporter: Reporter) -> Loaded:
    reporter.loading("torch")
    from asyncspec.backend.hf.checkpoint import open_checkpoint

    # Whoever has a draft model compares its tokenizer with the target's.
    compares = any(part not in WITHOUT_MODEL for part in parts(config.draft.source))
    target = open_checkpoint(config.target.path, tokenizer=compares)
    reporter.loading(f"draft {short(config.draft.source)}")
    source = load_source(config, target)
    machine = SourceMachine(
        SourceConfig(
            Rank(rank),
            target.facts.vocab_size,
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
    )


def _source_slots(config: Config, rank: int, source: Source) -> int:
    """Slots there is memory for; 0: no bound, where the source holds nothing worth counting."""
    if not source.token_bytes:
        return 0
    return max(1, draft_budget(config, rank) // source.token_bytes)


def _hello(config: Config, rank: int, role: Role, span: tuple[int, int], target: Any) -> Hello:
    from asyncspec.backend.hf.checkpoint import resolve_dtype

    return Hello(
        protocol=PROTOCOL_VERSION,
        cluster=config.cluster.name,
        rank=Rank(rank),
        role=role,
        stages=config.stages,
        layers=span,
        dtype=str(resolve_dtype(target, config.target.dtype)).removeprefix("torch."),
        fingerprint=target.fingerprint,
        mode=config.target.mode,
        quantize=config.target.quantize,
    )
