"""A cluster of real stages, of any backend, and a real token source in the simulator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from itertools import pairwise
from typing import Any, Generic, TypeVar

from asyncspec.backend.base import LoadedSource, ModelInfo
from asyncspec.backend.tree_stage import TreeStage
from asyncspec.sim.costs import Costs
from asyncspec.sim.world import Actor
from asyncspec_nodes.roles.draft.machine import DraftMachine
from asyncspec_nodes.roles.verify.config import VerifyConfig
from asyncspec_nodes.roles.verify.machine import VerifyMachine
from asyncspec_protocol.ids import DRAFT, Rank
from cluster import Cluster

S = TypeVar("S", bound=TreeStage[Any])


class LoadedTarget(ABC, Generic[S]):
    """A target's stages by their layers, each read once."""

    def __init__(self, info: ModelInfo) -> None:
        self.info = info
        self.stage = cache(self.load)

    @abstractmethod
    def load(self, first: int, end: int) -> S:
        """Read a stage."""

    def cut(self, stages: int) -> list[S]:
        """The whole target in ``stages`` stages of about the same depth."""
        edges = [self.info.layers * i // stages for i in range(stages + 1)]
        return [self.stage(first, end) for first, end in pairwise(edges)]


class StageCluster(Cluster):
    """As ``Cluster``; a stage that is restarted has forgotten its sessions."""

    def __init__(
        self, costs: Costs, loaded: LoadedTarget[Any], source: LoadedSource, **options: Any
    ) -> None:
        self.loaded = loaded
        self.source = source
        vocab = loaded.info.vocab_size
        super().__init__(costs, features=source.features, vocab=vocab, **options)

    def draft(self, rank: Rank = DRAFT) -> Actor:
        machine = DraftMachine(self.draft_config(rank))
        return Actor(machine, machine.initial(), *self.source_device(rank))

    def source_device(self, rank: Rank) -> tuple[Any, Any]:
        # On a node of its own the draft node has the tensors as well.
        return self.source.source.run, self.source.tensors

    def stage(self, rank: Rank) -> Actor:
        model_info, stage = self.loaded.info, self.loaded.cut(self.stages)[rank - 1]
        config = VerifyConfig(
            rank,
            self.stages,
            self.window,
            model_info.vocab_size,
            stage.layers[0],
            stage.layers[1],
            model_info.layers,
        )
        machine = VerifyMachine(config)
        return Actor(machine, machine.initial(), stage.run, stage)
