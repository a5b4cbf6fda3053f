"""From a cluster file to what one node needs to serve: its model, its machine, its facts.

Imports torch, inside the functions: the process entry has set the thread settings before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.actor.gauge import ALWAYS, NEVER
from asyncspec.backend.base import Tensors
from asyncspec.backend.paced import Pace, Paced
from asyncspec.backend.packing_cost import packing_seconds
from asyncspec.sim.draft_cost import DraftCost
from asyncspec.sim.stage_cost import StageCost
from asyncspec_nodes.cluster.chat_templates import PLAIN, read_template
from asyncspec_nodes.cluster.config_tables import Config, PaceTable
from asyncspec_nodes.cluster.layout import layout
from asyncspec_nodes.cluster.source_names import WITHOUT_MODEL, parts
from asyncspec_nodes.machines.draft.machine import DraftMachine
from asyncspec_nodes.machines.draft.state import DraftConfig
from asyncspec_nodes.machines.source import SourceConfig, SourceMachine
from asyncspec_nodes.machines.verify.machine import VerifyMachine
from asyncspec_nodes.machines.verify.state import VerifyConfig
from asyncspec_nodes.node.memory import cache_budget, draft_budget
from asyncspec_nodes.node.reports import Reporter
from asyncspec_nodes.node.sources import ELSEWHERE, Source, load_source, short
from asyncspec_nodes.serving.defaults import read_defaults
from asyncspec_nodes.serving.rules import Rules
from asyncspec_nodes.serving.service import TextCodec
from asyncspec_protocol.handshake import role_of
from asyncspec_protocol.ids import Rank, SessionId, first_session
from asyncspec_protocol.messages import PROTOCOL_VERSION, Hello, Role


class Loaded(Struct, frozen=True):
    """A node that can begin to serve."""

    me: Hello
    machine: DraftMachine | VerifyMachine | SourceMachine
    initial: object
    run_job: Callable[[Any], object | None]
    abandon_job: Callable[[Any], None]
    tensors: Tensors | None = None
    # As in ``LinkOptions``.
    packing_seconds: float = NEVER
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
        return NEVER
    if config.cluster.wire == "packed":
        return ALWAYS
    return packing_seconds() if loaded.me.dtype == "bfloat16" else NEVER


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
    from asyncspec.backend.hf.pass_times import pass_seconds

    taken = pass_seconds(stage)
    if rank in config.pace:
        pace = _stage_cost(config.pace[rank])
        taken = {rows: max(pace.seconds(rows), real) for rows, real in taken.items()}
    return taken


def _load_draft(config: Config, rank: Rank, reporter: Reporter) -> Loaded:
    reporter.loading("torch")
    from asyncspec.backend.hf.checkpoint import open_checkpoint
    from asyncspec_nodes.serving.tokenizer import load_tokenizer

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
