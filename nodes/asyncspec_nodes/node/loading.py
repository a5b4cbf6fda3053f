"""A node's part of a cluster file, loaded: its model, its machine, its ``Hello``.

Backends import torch when they are used, after the thread settings are made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.backend.base import (
    CPU,
    Backend,
    DeviceMemory,
    OpenModel,
    StageBackend,
    StageSpec,
    host_memory,
)
from asyncspec.backend.paced import Pace, Paced
from asyncspec.backend.prefix_files import PrefixFiles
from asyncspec.backend.registry import backend_of
from asyncspec.backend.row_compression import packing_seconds
from asyncspec.backend.tokenizer import Tokenizer
from asyncspec.constraint.worker import BoundError
from asyncspec.core.cost_model.bandwidth import ALWAYS_PACK, NEVER_PACK
from asyncspec.core.costs import DraftCost, StageCost
from asyncspec.core.errors import UserError
from asyncspec.core.tensors import Tensors
from asyncspec_nodes.cluster.automatic import described, resolved
from asyncspec_nodes.cluster.checkpoints import NONE, PLAIN, parts, read_template
from asyncspec_nodes.cluster.config import STARTED, Config, layout
from asyncspec_nodes.cluster.placement import with_layers
from asyncspec_nodes.node.disk_cache import disk_cache, feature_cache
from asyncspec_nodes.node.learning import HeadLearning
from asyncspec_nodes.node.processor import processor_of
from asyncspec_nodes.node.reports import Reporter
from asyncspec_nodes.node.resources import (
    MIB,
    cache_budget,
    devices_beside,
    shared_processors,
    stage_share,
)
from asyncspec_nodes.node.sources import (
    PassedOn,
    constrained,
    features_passed_on,
    grammars,
    report_and_load,
    source_kinds,
    source_slots,
)
from asyncspec_nodes.node.supervisor import Again
from asyncspec_nodes.roles.draft.config import MIN_COMMON_PREFIX, NO_PREFIX, DraftConfig
from asyncspec_nodes.roles.draft.machine import DraftMachine
from asyncspec_nodes.roles.source import SourceConfig, SourceMachine
from asyncspec_nodes.roles.verify.config import VerifyConfig, max_sessions
from asyncspec_nodes.roles.verify.machine import VerifyMachine
from asyncspec_nodes.serving.requests import ChatText, ServingConfig, encode_chat, read_defaults
from asyncspec_nodes.serving.templates import ChatFacts, facts_of
from asyncspec_protocol.ids import DRAFT, Rank, first_session_since
from asyncspec_protocol.limits import ITEM_BYTES
from asyncspec_protocol.links import MIXED, role_of
from asyncspec_protocol.messages import PROTOCOL_VERSION, Hello


class Loaded(Struct, frozen=True, kw_only=True):
    """A node that can begin to serve."""

    me: Hello
    machine: DraftMachine | VerifyMachine | SourceMachine
    run_job: Callable[[Any], object | None]
    abandon_job: Callable[[Any], None]
    tensors: Tensors | None = None
    # As in ``LinkOptions``.
    packing_seconds: float = NEVER_PACK
    # As in ``StageBackend``; empty on other nodes.
    guarantee: str = ""
    weights: str = ""
    # Threads that share a product.
    threads: int = 1
    # As in ``StageBackend``; on other nodes of what drafts.
    device: str = CPU
    device_memory: Callable[[], DeviceMemory | None] = host_memory
    # Draft node only.
    tokenizer: Tokenizer | None = None
    serving: ServingConfig | None = None
    # Its disk cache, where it has one.
    prefixes: PrefixFiles | None = None
    # What drafts, and why where "auto" chose it.
    draft: str = ""
    # Where the head that drafts here learns.
    learning: HeadLearning | None = None
    # End its other processes, when it has stopped.
    closing: tuple[Callable[[], None], ...] = ()


def load_node(config: Config, rank: int, reporter: Reporter) -> Loaded:
    """Load a node's part. Slow; raises ``UserError`` with what to change."""
    backend = backend_of(config.target_of(rank))
    reporter.loading(backend.library)
    config = with_layers(config)
    role = role_of(rank, config.stages)
    if role != "verify":
        config = resolved(config, stages_here=stage_share(config, rank))
    load = {"draft": _load_draft, "verify": _load_stage, "source": _load_source}[role]
    loaded = load(config, Rank(rank), backend, reporter)
    loaded = replace(
        loaded, threads=backend.threads(), packing_seconds=_packing_seconds(config, loaded.me)
    )
    if (pace := config.pace.get(rank)) is None:
        return loaded
    first, end = loaded.me.layers
    stage_cost = StageCost(pace.seconds, pace.plateau, pace.row_seconds)
    draft_cost = DraftCost(pace.level_seconds, pace.call_seconds)
    device = Paced(
        loaded.run_job, loaded.abandon_job, Pace(stage_cost, draft_cost, layers=max(1, end - first))
    )
    return replace(loaded, run_job=device.run, abandon_job=device.abandon)


def after_end(loaded: Loaded, again: Again, at: float) -> Loaded:
    """A node that tells its peers how its predecessor has ended, ``at`` seconds since 1970: a stage
    the draft nodes, a draft node its clients."""
    name, crashed = round(1000 * at), again == "crashed"
    if isinstance(machine := loaded.machine, VerifyMachine):
        killed = name if again == "oom_killed" else 0
        config = replace(machine.config, memory_kill=killed, crash=name if crashed else 0)
        return replace(loaded, machine=VerifyMachine(config))
    return replace(loaded, me=replace(loaded.me, crash=name)) if crashed else loaded


def _packing_seconds(config: Config, me: Hello) -> float:
    """Cost of packing rows; measured where it decides whether to pack."""
    if config.cluster.wire == "plain" or me.role != "verify":
        return NEVER_PACK
    if config.cluster.wire == "packed":
        return ALWAYS_PACK
    return packing_seconds() if me.dtype == "bfloat16" else NEVER_PACK


def _load_stage(config: Config, rank: Rank, backend: Backend, reporter: Reporter) -> Loaded:
    last = rank == config.stages
    # Only the last stage draws, and then within a grammar over the tokenizer's vocabulary.
    model = backend.open(config.target_of(rank), tokenizer=last)
    layers = model.info.layers
    span = layout(config, layers)[rank - 1]
    reporter.loading(f"layers {span[0]} to {span[1] - 1} of {layers}")
    stage = backend.load(StageSpec(model, span, config.stage_options_of(rank)))
    if last:
        stage.constrain(grammars(backend, model))
    pass_seconds = stage.pass_seconds()
    if pace := config.pace.get(rank):
        cost = StageCost(pace.seconds, pace.plateau, pace.row_seconds)
        pass_seconds = {
            rows: max(cost.seconds(rows), measured) for rows, measured in pass_seconds.items()
        }
    me = _hello(config, rank, model, span)
    prefixes = disk_cache(config, rank, backend, model, span, stage, reporter)
    return Loaded(
        me=me,
        machine=VerifyMachine(
            VerifyConfig(
                rank=rank,
                stages=config.stages,
                window=config.limits.window,
                batch_rows=config.limits.batch_rows,
                planner=config.limits.planner,
                slots=_stage_slots(config, rank, stage),
                vocab=model.info.vocab_size,
                first_layer=span[0],
                end_layer=span[1],
                layers=layers,
                processor=processor_of(stage.device, lambda name: backend.device_of(name)[0]),
                tried_rows=tuple(pass_seconds),
                tried_microseconds=tuple(round(1e6 * took) for took in pass_seconds.values()),
                shares_prefixes=model.info.shares_prefixes,
                keeps_states=model.info.keeps_states and not config.mixed,
                stores_prefixes=prefixes is not None,
                row_bytes=model.info.hidden_size * ITEM_BYTES[me.dtype],
                sessions=max_sessions(config.limits.sessions),
            )
        ),
        run_job=stage.run,
        abandon_job=stage.abandon,
        tensors=stage,
        guarantee="tolerance" if config.mixed else stage.guarantee,
        weights=stage.weights,
        prefixes=prefixes,
        device=stage.device,
        device_memory=stage.device_memory,
    )


def _stage_slots(config: Config, rank: int, stage: StageBackend) -> int:
    """Slots there is memory for beside what every session has. Raises ``UserError``."""
    budget = cache_budget(config, rank, stage.device_memory())
    left = budget - config.limits.sessions * stage.session_bytes
    if stage.session_bytes and left < stage.cache_bytes(1):
        raise UserError(
            f"{config.limits.sessions} sessions of {stage.session_bytes / MIB:.0f} MiB of states "
            f"each do not fit {budget // MIB} MiB of stage {rank}; lower limits.sessions or raise "
            "limits.cache_mib"
        )
    return left // stage.cache_bytes(1)


def _load_draft(config: Config, rank: Rank, backend: Backend, reporter: Reporter) -> Loaded:
    target = backend.open(config.target.path)
    # A mistake in the layers is every node's: all of them name it at once.
    layout(config, target.info.layers)
    defaults = read_defaults(config.target.path, config.target.generation_config)
    learning = _learning(config, rank, reporter) if config.source is None else None
    reporter.loading("tokenizer")
    tokenizer = backend.load_tokenizer(target, read_template(config.target.chat_template))
    target_grammars = grammars(backend, target, tokenizer, bounded=True)
    # The process that writes conversations starts while the source is loaded.
    with ThreadPoolExecutor(1, "templates") as beside:
        facts = beside.submit(_chat_facts, tokenizer, config.target.path)
        if config.source is None:
            loaded = report_and_load(config, rank, target, reporter, learning)
            source = constrained(loaded, target_grammars)
        else:
            source = features_passed_on(config, target, backend)
    devices = devices_beside(config, rank, source.device, backend.device_name)
    keeps_states = target.info.keeps_states and not config.mixed
    shares = target.info.shares_prefixes or keeps_states
    # ``PLAIN`` serves chats of targets that were not made for them.
    chats = tokenizer.has_template and config.target.chat_template != PLAIN
    prefixes = feature_cache(config, rank, backend, target, source, reporter)
    return Loaded(
        me=_hello(config, rank, target, chat_template=chats),
        machine=DraftMachine(
            DraftConfig(
                stages=config.stages,
                source=None if config.source is None else Rank(config.stages + 1),
                # Where there may be several the file names none.
                sole=config.find(0) is not None,
                vocab=target.info.vocab_size,
                max_sessions=config.limits.sessions,
                batch_rows=config.limits.batch_rows,
                rejoin_seconds=config.limits.rejoin_seconds,
                features=source.features,
                usable_drafts=source.usable,
                processors=shared_processors(
                    devices, backend.threads(), len(config.nodes) - len(devices)
                ),
                stores_features=prefixes is not None,
                awaits_features=bool(source.tensors and not source.features),
                source_remembers=config.draft.learn
                or any(kind.remembers for kind in source_kinds(config)),
                min_common_prefix=MIN_COMMON_PREFIX if shares else NO_PREFIX,
                keeps_states=keeps_states,
                slots=source_slots(config, rank, source),
                first_session=first_session_since(rank, time.time_ns()),
            )
        ),
        run_job=source.source.run,
        abandon_job=source.source.abandon,
        tensors=PassedOn(source.tensors),
        prefixes=prefixes,
        tokenizer=tokenizer,
        learning=learning,
        closing=(tokenizer.close, target_grammars.close),
        device=source.device,
        device_memory=source.device_memory,
        draft=described(config.draft),
        serving=ServingConfig(
            context_length=config.limits.context_of(target.info.context_length),
            context_reason=config.limits.reason_of(target.info),
            layers=target.info.layers,
            eos=frozenset(target.info.eos_token_ids),
            policy=config.draft.policy,
            drafts=parts(config.draft.source) != (NONE,),
            vocab=target.info.vocab_size,
            defaults=defaults,
            grammars=target_grammars,
            chat=facts.result() if chats else ChatFacts(),
        ),
    )


def _chat_facts(tokenizer: Tokenizer, target: str) -> ChatFacts:
    """What the target's chat template can do, and its prompts. Raises ``UserError`` for a template
    that takes too much."""

    def render(options: Mapping[str, Any]) -> str:
        try:
            return tokenizer.prompt(encode_chat([ChatText("user", "Hello")], options=options))
        except BoundError as error:
            raise UserError(
                f"{target}: {error}; give another template (serve --chat-template FILE)"
            ) from None
        except ValueError:
            return ""  # it takes no conversation as short as this, or no such option

    return facts_of(tokenizer.template, render)


def _load_source(config: Config, rank: Rank, backend: Backend, reporter: Reporter) -> Loaded:
    target = backend.open(config.target.path)
    learning = _learning(config, rank, reporter)
    source = report_and_load(config, rank, target, reporter, learning)
    source = constrained(source, grammars(backend, target))
    return Loaded(
        me=_hello(config, rank, target),
        machine=SourceMachine(
            SourceConfig(
                rank,
                target.info.vocab_size,
                sessions=config.limits.sessions,
                slots=source_slots(config, rank, source),
                features=source.features,
            )
        ),
        run_job=source.source.run,
        abandon_job=source.source.abandon,
        tensors=source.tensors,
        learning=learning,
        device=source.device,
        device_memory=source.device_memory,
    )


def _learning(config: Config, rank: Rank, reporter: Reporter) -> HeadLearning | None:
    if not config.draft.learn:
        return None
    cluster = config.cluster.name
    if cluster.startswith(f"{STARTED}-"):
        cluster = STARTED  # the next one goes on with what this one learns
    if config.source is not None:
        rank = DRAFT  # there is one source, whose rank depends on the number of stages
    return HeadLearning(cluster, rank, config.target.path, reporter.log)


def _size(target: OpenModel) -> str:
    """What files of one model in several formats have in common, as a fingerprint."""
    info = target.info
    return f"{MIXED}{info.layers} {info.hidden_size} {info.vocab_size}"


def _hello(
    config: Config,
    rank: Rank,
    target: OpenModel,
    span: tuple[int, int] = (0, 0),
    *,
    chat_template: bool = False,
) -> Hello:
    return Hello(
        protocol=PROTOCOL_VERSION,
        cluster=config.cluster.name,
        rank=rank,
        role=role_of(rank, config.stages),
        stages=config.stages,
        layers=span,
        dtype=target.computed_dtype(config.target.dtype),
        fingerprint=_size(target) if config.mixed else target.fingerprint,
        mode=config.target.mode,
        quantize=config.target.quantize,
        chat_template=chat_template,
    )
