"""Which stage computes wrongly: found by itself, whichever it is, and no other is accused."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncspec.core.errors import ClusterError
from asyncspec.core.jobs import Job
from asyncspec.core.rng import MASK
from asyncspec.core.tensors import WireTensor
from asyncspec.plugins.toy.model import ToyModel, ToyStage
from asyncspec.sim.world import Actor
from asyncspec_nodes.plugins.simulation.cluster import connect
from asyncspec_nodes.reference.probe import RANK, WireTensors
from asyncspec_nodes.reference.stages import numbers, wrong_stages
from asyncspec_nodes.roles.stage_probe import CHUNK, StageProbe, StageProbeConfig, StageStates
from asyncspec_protocol.ids import Rank, first_session
from cluster import Cluster
from costs import UnitCosts
from effort import examples

LAYERS, VOCAB = 6, 16
MODEL = ToyModel(layers=LAYERS, vocab=VOCAB)


class WrongLayer(ToyModel, frozen=True):
    """Attends wrongly where it sees more than a few nodes."""

    def attend(self, layer: int, hidden: int, visible: Sequence[int]) -> int:
        return super().attend(layer, hidden, visible) ^ (MASK if len(visible) > 3 else 0)


class WrongHead(ToyModel, frozen=True):
    def norm(self, hidden: int) -> int:
        return super().norm(hidden) ^ MASK

    def mode(self, hidden: int) -> int:
        return (super().mode(hidden) + 1) % self.vocab


class ProbedCluster(Cluster):
    """With a stage that computes another ``model``."""

    def __init__(self, stages: int, wrong: Rank, model: ToyModel, slots: int = 0) -> None:
        self.wrong, self.wrong_model = wrong, model
        super().__init__(UnitCosts(), stages=stages, model=MODEL, slots=slots)

    def stage(self, rank: Rank) -> Actor:
        actor = super().stage(rank)
        if rank == self.wrong:
            backend = ToyStage(self.wrong_model, *self.backends[rank].layers)
            actor.device, actor.tensors = backend.run, backend
        return actor

    def probe(self, texts: Sequence[tuple[int, ...]]) -> StageStates:
        """As ``reference.probe``."""
        depths = tuple(LAYERS * rank // self.stages for rank in range(1, self.stages + 1))
        machine = StageProbe(StageProbeConfig(self.stages, (*texts,), depths, first_session(RANK)))
        actor = Actor(machine, machine.initial(), no_device, WireTensors())
        self.world.actors[RANK] = actor
        connect(self.world, self.stages, [RANK])
        self.world.run(until=1e9)
        assert self.world.finished[0].reason == "stop", self.world.finished[0].detail
        return StageStates(depths, actor.state.chunks, same_machine=True)


def no_device(job: Job) -> None:
    raise ClusterError(f"a probe computes nothing: {job}")


def local(stages: int) -> list[ToyStage]:
    edges = [LAYERS * rank // stages for rank in range(stages + 1)]
    return [ToyStage(MODEL, *edges[i : i + 2]) for i in range(stages)]


texts = st.lists(
    st.lists(st.integers(0, VOCAB - 1), min_size=5, max_size=2 * CHUNK + 3).map(tuple),
    min_size=1,
    max_size=3,
)


@settings(max_examples=examples(200, quick=20))
@given(st.integers(1, LAYERS), st.data(), texts)
def test_the_stage_whose_layers_are_wrong_is_named_and_no_other(
    stages: int, data: st.DataObject, texts: list[tuple[int, ...]]
) -> None:
    wrong = Rank(data.draw(st.integers(0, stages)))
    cluster = ProbedCluster(stages, wrong, WrongLayer(layers=LAYERS, vocab=VOCAB))
    found = wrong_stages(local(stages), cluster.probe(texts))
    assert found.keys() == set(range(len(texts)))
    for deviations in found.values():
        assert deviations.keys() == ({wrong} if wrong else set())
        for deviation in deviations.values():
            # The first that sees four nodes.
            assert deviation.position < CHUNK
            assert deviation.what == "a hidden state"


def test_a_head_that_is_wrong_is_its_stage_s_fault() -> None:
    cluster = ProbedCluster(3, Rank(3), WrongHead(layers=LAYERS, vocab=VOCAB))
    (deviations,) = wrong_stages(local(3), cluster.probe([(1, 2, 3, 4, 5)])).values()
    assert deviations.keys() == {3}
    assert "the log-probability" in str(deviations[3])


def test_a_text_is_cut_to_the_slots_of_the_stages() -> None:
    cluster = ProbedCluster(2, Rank(0), MODEL, slots=400)
    probed = cluster.probe([(1,) * 500])
    assert CHUNK < sum(len(chunk.tokens) for chunk in probed.chunks) < 200  # of two draft nodes
    assert wrong_stages(local(2), probed) == {0: {}}


def test_a_lost_stage_ends_the_probe() -> None:
    machine = StageProbe(StageProbeConfig(1, ((1, 2),), (6,), first_session(RANK)))
    cluster = ProbedCluster(1, Rank(0), MODEL)
    cluster.world.actors[RANK] = Actor(machine, machine.initial(), no_device, WireTensors())
    connect(cluster.world, 1, [RANK])
    cluster.world.cut(RANK, Rank(1))
    cluster.world.run(until=1e9)
    assert cluster.world.finished[0].reason == "error"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_numbers_of_a_type_that_numpy_has(dtype: str) -> None:
    values = np.array([[0.5, -3.0]], dtype)
    wire = WireTensor(dtype, (1, 2), memoryview(values).cast("B"))
    assert numbers(wire).tolist() == [[0.5, -3.0]]


def test_numbers_of_bfloat16() -> None:
    values = np.array([[0.5, -3.0]], np.float32).view(np.uint32) >> 16
    wire = WireTensor("bfloat16", (1, 2), memoryview(values.astype(np.uint16)).cast("B"))
    assert numbers(wire).tolist() == [[0.5, -3.0]]
