"""Cells on the virtual clock: the real machines and the real token source, priced stages.

The target's text is decoded once, sequentially; a stage then only looks it up (``text_stage.py``),
so a cell costs its draft passes and no more, however many stages it has. How long passes, drafts
and messages take is the cost model's business; the wall clock is nowhere in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncspec.backend.base import DType, LoadedSource
from asyncspec.core.errors import AsyncSpecError
from asyncspec.core.machine import Request, Submitted
from asyncspec.sim.costs import CostModel
from asyncspec.sim.world import Actor, World
from asyncspec.source.suffix import SuffixSource
from asyncspec_nodes.cluster.checkpoints import SUFFIX
from asyncspec_nodes.cluster.config import DraftTable, TargetTable, even_split
from asyncspec_nodes.local.cluster import local_config
from asyncspec_nodes.node.sources import load_source
from asyncspec_nodes.plugins.simulation.cluster import MAX_STEPS, connect, with_trial
from asyncspec_nodes.roles.draft.config import DraftConfig
from asyncspec_nodes.roles.draft.machine import DraftMachine
from asyncspec_nodes.roles.tasks import TASKS
from asyncspec_nodes.roles.verify.config import VerifyConfig
from asyncspec_nodes.roles.verify.machine import VerifyMachine
from asyncspec_protocol.ids import DRAFT, Rank, SessionId
from tools.bench.report.cell import Ask, Cell, Setting, Stats
from tools.bench.report.models import Models
from tools.bench.report.target import Target
from tools.bench.report.text_stage import TextStage

RESTART_NONE = 1e9
"""Seconds of virtual time, a bound on hangs."""


class WrongText(AsyncSpecError):
    """The machines have not given the target's text: a bug of ours."""


class VirtualEngine:
    """Measures cells. Models are loaded when they are first needed."""

    def __init__(self, models: Models, dtype: DType = "auto") -> None:
        self.models = models
        self._dtype: DType = dtype
        self.target = Target(models.target, dtype)
        self._sources: dict[str, LoadedSource] = {}
        # Features of the last text, which the next cell most likely asks for again.
        self._features: tuple[object, Any] = (None, None)
        self._sessions = 0

    def source(self, label: str) -> LoadedSource:
        """A token source by its label; its sessions are over between cells."""
        if label not in self._sources:
            name = self.models.source(label)
            table = DraftTable(source=name, policy="autoregressive")
            config = local_config(TargetTable(self.models.target, dtype=self._dtype), table, 1, 1)
            loaded = load_source(config, self.target.checkpoint)
            if SUFFIX in name.split("+"):
                return loaded  # it would remember the answers of other cells
            self._sources[label] = loaded
        return self._sources[label]

    def measure(
        self, cell: Cell, answer: Sequence[int], earlier: Sequence[Sequence[int]] = ()
    ) -> Stats:
        """Run a cell whose text is known, with a source that has seen ``earlier`` answers. Raises
        ``WrongText``."""
        text = (*self.target.encode(cell.ask), *answer)
        source = self.source(cell.setting.source)
        if isinstance(source.source, SuffixSource):
            for one in earlier:
                source.source.earlier.add("", one)
        world = self._world(cell.setting, text, source)
        world.feed(DRAFT, Submitted(self._request(cell, len(text) - len(answer))))
        world.run(most_steps=MAX_STEPS)
        if tuple(world.tokens.get(0, ())) != tuple(answer):
            raise WrongText(f"not the target's text, by {cell}; this is a bug in asyncspec")
        return world.finished[0].stats

    def _request(self, cell: Cell, prompt_tokens: int) -> Request:
        ask: Ask = cell.ask
        return Request(
            request=0,
            prompt=self.target.encode(ask)[:prompt_tokens],
            max_new_tokens=ask.tokens,
            sampling=ask.sampling,
            stop_tokens=frozenset(self.target.info.eos_token_ids),
            policy=cell.setting.policy,
        )

    def _world(self, setting: Setting, text: tuple[int, ...], source: LoadedSource) -> World:
        actors = {DRAFT: self._draft(setting, source)}
        for rank in map(Rank, range(1, setting.stages + 1)):
            actors[rank] = self._stage(setting, rank, text, source)
        pricing = CostModel(setting.cost)
        world = World(actors, pricing, wires=pricing, tasks=TASKS)
        connect(world, setting.stages)
        return world

    def _draft(self, setting: Setting, source: LoadedSource) -> Actor:
        self._sessions += 1  # what a broken run has left behind is nobody's
        config = DraftConfig(
            stages=setting.stages,
            max_sessions=1,
            stats_seconds=RESTART_NONE,
            features=source.features,
            first_session=SessionId(self._sessions),
        )
        machine = DraftMachine(config)
        return Actor(machine, machine.initial(), source.source.run, source.tensors)

    def _stage(
        self, setting: Setting, rank: Rank, text: tuple[int, ...], source: LoadedSource
    ) -> Actor:
        last = rank == setting.stages
        features = self._read(text, source.features) if last and source.features else None
        # Heads read the outputs of layers: which stage has them decides what travels.
        layers = max(self.target.info.layers, setting.stages)
        first, end = even_split(layers, setting.stages)[rank - 1]
        config = VerifyConfig(
            rank=rank, stages=setting.stages, first_layer=first, end_layer=end, layers=layers
        )
        machine = VerifyMachine(with_trial(config, setting.cost))
        device = TextStage(text, features, last=last)
        # Features travel as tensors; hidden states are nobody's and need no form.
        tensors = source.tensors if last else None
        return Actor(machine, machine.initial(), device.run, tensors)

    def _read(self, text: tuple[int, ...], wanted: tuple[int, ...]) -> Any:
        if self._features[0] != (text, wanted):
            self._features = ((text, wanted), self.target.features(text, wanted))
        return self._features[1]
