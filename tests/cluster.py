"""A toy cluster in the simulator: what most laws are about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from asyncspec.backend.feature_files import FeatureFiles
from asyncspec.backend.prefix_files import PrefixFiles
from asyncspec.constraint.source import ConstrainedSource
from asyncspec.core.machine import Request, Submitted
from asyncspec.core.reference import decode
from asyncspec.core.sampling import Sampling
from asyncspec.plugins.toy.model import ToyModel, ToyStage
from asyncspec.plugins.toy.source import ToyEagle, ToyFeatures, ToySource
from asyncspec.policy.base import Policy
from asyncspec.policy.registry import POLICIES
from asyncspec.sim.costs import Costs
from asyncspec.sim.world import Actor, World
from asyncspec.trace.recorder import Recorder
from asyncspec.trace.records import DECODER, ENCODER, FORMAT, Record, Trace, TraceHeader
from asyncspec_nodes.node.sources import PassedOn
from asyncspec_nodes.plugins.simulation.cluster import connect, recorder
from asyncspec_nodes.roles.draft.config import DraftConfig
from asyncspec_nodes.roles.draft.machine import DraftMachine
from asyncspec_nodes.roles.source import SourceConfig, SourceMachine
from asyncspec_nodes.roles.tasks import TASKS
from asyncspec_nodes.roles.verify.config import VerifyConfig, max_sessions
from asyncspec_nodes.roles.verify.machine import VerifyMachine
from asyncspec_protocol.ids import DRAFT, Rank, SessionId, draft_rank, first_session, is_draft
from languages import GRAMMARS, allowed

DISK_BYTES = 1 << 20
"""Of a stage's disk cache."""

LIFE = 1000
"""Sessions a draft node opens at most before it is started again."""


class Cluster:
    """One draft node or several, and N stages of a toy model, linked and ready."""

    def __init__(
        self,
        costs: Costs,
        *,
        stages: int = 3,
        drafts: int = 1,
        model: ToyModel | None = None,
        top: float = 0.65,
        policies: dict[str, Policy] | None = None,
        window: int = 2,
        batch_rows: int = 64,
        slots: int = 0,
        source_slots: int = 0,
        min_common_prefix: int = 1000,
        keeps_states: bool = False,
        prefill_rows: int = 4,
        max_sessions: int = 4,
        rejoin_seconds: float = 1e9,
        max_breaks: int = 10**9,
        stats_seconds: float = 2.0,
        features: tuple[int, ...] = (),
        vocab: int | None = None,
        apart: bool = False,
        record: bool = False,
        world: type[World] = World,
        disks: Path | None = None,
        min_disk_prefix: int = 32,
    ) -> None:
        """``vocab``: the target's, where it is not ``model``'s. ``apart``: the token source is a
        node of its own for all draft nodes. ``disks``: folder of the stages' disk caches."""
        self.disks = disks
        self.features = features
        self.costs = costs
        self.model = model or ToyModel()
        self.stages = stages
        self.top = top
        self.window = window
        self.batch_rows = batch_rows
        self.slots = slots
        self.source_slots = source_slots
        self.config = DraftConfig(
            stages=stages,
            policies=policies or POLICIES,
            prefill_rows=prefill_rows,
            max_sessions=max_sessions,
            rejoin_seconds=rejoin_seconds,
            max_breaks=max_breaks,
            stats_seconds=stats_seconds,
            slots=0 if apart else source_slots,
            min_common_prefix=min_common_prefix,
            keeps_states=keeps_states,
            min_disk_prefix=min_disk_prefix,
            max_cached_prompts=3,
            features=() if apart else features,
            awaits_features=apart and bool(features),
            stores_features=disks is not None and bool(features),
            source=Rank(stages + 1) if apart else None,
            sole=drafts == 1,
            vocab=vocab or self.model.vocab,
        )
        self.backends: dict[Rank, ToyStage] = {}
        # The token sources, which may be nodes of their own.
        self.sources: dict[Rank, ConstrainedSource] = {}
        # The draft nodes that take part; each may leave and come back.
        self.drafts = {draft_rank(number) for number in range(drafts)}
        # Fresh draft nodes so far, by rank: session ids grow also over restarts.
        self.starts: Counter[Rank] = Counter()
        actors = {rank: self.draft(rank) for rank in sorted(self.drafts)}
        for rank in range(1, stages + 1):
            actors[Rank(rank)] = self.stage(Rank(rank))
        if self.config.source is not None:
            actors[self.config.source] = self.source_node(self.config.source)
        # One for each node where the run is recorded.
        self.recorders: dict[Rank, Recorder] = {}
        self.world = world(actors, costs, self.recorders, tasks=TASKS)
        if record:
            for rank, actor in actors.items():
                self.recorders[rank] = self.recorder(rank, actor)
        self.connect_all()

    def draft(self, rank: Rank = DRAFT) -> Actor:
        """A fresh draft node."""
        machine = DraftMachine(self.draft_config(rank))
        if self.config.source is not None:
            idle = ToySource(self.model)
            actor = Actor(machine, machine.initial(), idle.run, PassedOn(ToyFeatures()))
        else:
            run, tensors = self.source_device(rank)
            actor = Actor(machine, machine.initial(), run, PassedOn(tensors))
        if machine.config.stores_features:
            assert self.disks is not None
            folder = self.disks / f"features{rank}"
            actor.prefixes = FeatureFiles(folder, DISK_BYTES, ToyFeatures())
        return actor

    def source_device(self, rank: Rank) -> tuple[Any, Any]:
        """A fresh token source: what runs its jobs, and its ``Tensors``."""
        source: ToySource = ToySource(self.model, top=self.top)
        eagle = None
        if self.features:
            source = eagle = ToyEagle(self.model, self.features, top=self.top)
        constrained = self.sources[rank] = ConstrainedSource(source, lambda: GRAMMARS)
        return constrained.run, eagle

    def draft_config(self, rank: Rank) -> DraftConfig:
        """How a fresh draft node works; its session ids are above those of its lives before."""
        first = SessionId(first_session(rank) + LIFE * self.starts[rank])
        self.starts[rank] += 1
        return replace(self.config, first_session=first)

    def source_node(self, rank: Rank) -> Actor:
        """A fresh node for the token source."""
        most = self.config.max_sessions
        config = SourceConfig(rank, self.config.vocab, most, self.source_slots, self.features)
        machine = SourceMachine(config)
        return Actor(machine, machine.initial(), *self.source_device(rank))

    def node(self, rank: Rank) -> Actor:
        """A fresh node."""
        if is_draft(rank):
            return self.draft(rank)
        return self.source_node(rank) if rank == self.config.source else self.stage(rank)

    def stage(self, rank: Rank) -> Actor:
        """A fresh stage, layers split evenly."""
        layers, stages = self.model.layers, self.stages
        first, end = layers * (rank - 1) // stages, layers * rank // stages
        backend = ToyStage(self.model, first, end)
        backend.constrain(GRAMMARS)
        self.backends[rank] = backend
        config = VerifyConfig(
            rank,
            stages,
            self.window,
            self.model.vocab,
            first,
            end,
            layers,
            batch_rows=self.batch_rows,
            slots=self.slots,
            sessions=max_sessions(self.config.max_sessions),
            shares_prefixes=not self.config.keeps_states,
            keeps_states=self.config.keeps_states,
            stores_prefixes=self.disks is not None,
        )
        machine = VerifyMachine(config)
        actor = Actor(machine, machine.initial(), backend.run, backend)
        if self.disks is not None:
            folder = self.disks / f"stage{rank}of{stages}"
            actor.prefixes = PrefixFiles(folder, DISK_BYTES)
        return actor

    def recorder(self, rank: Rank, actor: Actor) -> Recorder:
        """Listens to a node from now on."""
        return recorder(self.world, rank, actor, self.stages)

    def trace(self) -> Trace:
        """What was recorded, as a file would hold it."""
        header = TraceHeader(FORMAT, "asyncspec", "2026-01-01T00:00:00.000+00:00", "toy")
        lines: list[Record] = []
        for one in self.recorders.values():
            found, _ = one.read(0, one.end)
            lines += [one.node, *found, one.ended()]
        # Through the encoder, as what cannot be written and read back is no trace.
        text = ENCODER.encode_lines(lines).splitlines()
        decoded = [DECODER.decode(line) for line in text]
        return Trace(header, tuple(line for line in decoded if not isinstance(line, TraceHeader)))

    def connect_all(self) -> None:
        """Bring up every link that is down, of the draft nodes that take part."""
        connect(self.world, self.stages, sorted(self.drafts))
        for rank in sorted(self.drafts):
            if self.config.source is not None:
                self.world.connect(rank, self.config.source)

    def restart_all(self) -> None:
        """Every process is killed, and started again."""
        for rank in sorted(self.world.actors):
            self.world.restart(rank, self.node(rank))
        self.connect_all()

    def leave(self, rank: Rank) -> None:
        """A draft node ends, and what its users wanted with it."""
        self.drafts.discard(rank)
        self.world.restart(rank, self.draft(rank))

    def submit(self, request: Request, to: Rank = DRAFT) -> None:
        """A user asks a draft node, now."""
        self.world.feed(to, Submitted(request))

    def expected(self, request: Request) -> tuple[int, ...]:
        """What the sequential reference decoder writes."""
        start, how = len(request.prompt), request.sampling
        state, known = self.model.start(), 0

        def next_token(tokens: Sequence[int]) -> int:
            # To read all of a text again for each of its tokens took longer than the clusters.
            nonlocal state, known
            for token in tokens[known:]:
                state = self.model.extend(state, token)
            known = len(tokens)
            return self.model.next_token(tokens, how, start, allowed(tokens, start, how), state)

        return decode(next_token, request.prompt, request.max_new_tokens, request.stop_tokens)

    def state(self, rank: int) -> Any:
        """A machine's state."""
        return self.world.actors[Rank(rank)].state


def ask(number: int = 0, **changes: Any) -> Request:
    """A request with small defaults."""
    fields: dict[str, Any] = {
        "request": number,
        "prompt": (1, 2, 3, 4, 5, 6),
        "max_new_tokens": 24,
        "sampling": Sampling(),
        "stop_tokens": frozenset(),
        "policy": "flowspec",
    }
    return Request(**{**fields, **changes})
