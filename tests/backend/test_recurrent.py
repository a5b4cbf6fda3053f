"""States of recurrent layers: whatever is kept or computed again, the bits are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple, replace

from asyncspec.backend import reference
from asyncspec.backend.reference import SESSION, decode
from asyncspec.core.jobs import Admit, Row
from asyncspec.core.kv_slots import SlotTable, allocate, reclaim
from asyncspec.core.sampling import Sampling
from asyncspec.plugins.hf.attention import recurrent
from asyncspec.plugins.hf.attention.recurrent import (
    UNCOMMITTED,
    Inputs,
    StateCache,
    StateShape,
    step,
)
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec.plugins.hf.checkpoint.model_config import inspect_checkpoint
from asyncspec.plugins.hf.model.footprint import footprint
from asyncspec.plugins.hf.model.stage import load_stage
from asyncspec.testing import engines
from asyncspec_protocol.ids import NodeId
from backend.probe import cut
from backend.tiny import generated

pytestmark = pytest.mark.torch

SHAPE = StateShape(heads=2, key_width=3, value_width=5, channels=7, kernel=4, key_heads=2)
# As Mamba-2 has them: heads share keys, and values are added.
SHARED = replace(SHAPE, key_heads=1)
VOCAB = 16


class Node:
    """A node's inputs; its state and window are those of the recurrence as it is defined."""

    def __init__(self, number: int, above: Node | None, shape: StateShape = SHAPE) -> None:
        generator = torch.Generator().manual_seed(number)

        def random(*size: int) -> torch.Tensor:
            return torch.rand(*size, generator=generator)

        self.channels, self.query = random(7), random(2, 3)
        strength = random(2) if shape is SHAPE else None
        self.inputs = Inputs(random(shape.key_heads, 3), random(2, 5), random(2), strength)
        before = torch.zeros(2, 3, 5) if above is None else above.state
        self.state: torch.Tensor = step(before, self.inputs)
        window = torch.zeros(4, 7) if above is None else above.window
        self.window: torch.Tensor = torch.cat([window[1:], self.channels[None]])
        self.path: frozenset[int] = (above.path if above else frozenset()) | {number}

    def read(self) -> torch.Tensor:
        """What its query reads [heads, V]."""
        return torch.bmm(self.query[:, None], self.state)[:, 0]


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), kept=st.integers(1, 9), shape=st.sampled_from([SHAPE, SHARED]))
def test_a_node_reads_the_state_of_its_path(seed: int, kept: int, shape: StateShape) -> None:
    """A tree that grows, is pruned, compacted and committed at random."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(recurrent, "KEPT_STATES", kept)
    random, cache, table = Random(seed), StateCache(shape), SlotTable()
    nodes: dict[NodeId, Node] = {}
    committed: set[NodeId] = set()
    for _ in range(random.randint(1, 12)):
        ids = [NodeId(len(nodes) + i) for i in range(random.randint(1, 6))]
        parents: list[NodeId] = []
        for i, node in enumerate(ids):
            parents.append(random.choice([table.tip, *table.speculative_nodes, *ids[:i]]))
            nodes[node] = Node(node, nodes.get(parents[-1]), shape)
        start = table.committed
        table, rows = allocate(table, ids, parents, committed.__contains__)
        fresh = [nodes[node] for node in ids]
        windows = cache.windows(start, rows, torch.stack([n.channels for n in fresh]))
        assert torch.equal(windows, torch.stack([n.window for n in fresh]))
        queries = torch.stack([n.query for n in fresh])
        read = cache.read(start, rows, queries, [n.inputs for n in fresh])
        assert torch.equal(read, torch.stack([n.read() for n in fresh]))
        cache.check(start)
        if table.speculative and random.random() < 0.6:
            tip = random.choice(table.speculative_nodes)
            committed |= {NodeId(node) for node in nodes[tip].path}
            alive = {node for node in table.speculative_nodes if tip in nodes[node].path}
            old = table.committed
            kept_nodes = alive | committed
            table, stay = reclaim(table, committed.__contains__, kept_nodes.__contains__)
            if stay is not None:
                cache.compact(old, stay)
    monkeypatch.undo()


class Tree:
    """Passes of a session that commits nothing, and the steps that they take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = 0
        self.slots: list[tuple[int, ...]] = []
        self._nodes: list[Node] = []
        self._cache = StateCache(SHAPE)
        monkeypatch.setattr(recurrent, "step", self._step)

    def run(self, parents: Sequence[int]) -> None:
        """Give new nodes their slots, in order, below their parents, and check what they read."""
        rows = []
        for parent in parents:
            slot = len(self.slots)
            self.slots.append((*(self.slots[parent] if parent >= 0 else ()), slot))
            self._nodes.append(Node(slot, self._nodes[parent] if parent >= 0 else None))
            rows.append(Row(slot, len(self.slots[slot]) - 1, self.slots[slot]))
        fresh = self._nodes[len(self._nodes) - len(rows) :]
        windows = self._cache.windows(0, rows, torch.stack([n.channels for n in fresh]))
        assert torch.equal(windows, torch.stack([n.window for n in fresh]))
        queries = torch.stack([n.query for n in fresh])
        read = self._cache.read(0, rows, queries, [n.inputs for n in fresh])
        assert torch.equal(read, torch.stack([n.read() for n in fresh]))
        self._cache.check(0)

    def _step(self, state: torch.Tensor, given: Inputs) -> torch.Tensor:
        self.steps += 1
        return step(state, given)


def combs(spine: int, tooth: int) -> tuple[list[int], list[int]]:
    """A chain, and a pass with a chain below each of its nodes."""
    teeth = []
    for node in range(spine):
        first = spine + node * tooth
        teeth += [node, *range(first, first + tooth - 1)]
    return [*range(-1, spine - 1)], teeth


@pytest.mark.parametrize(("spine", "tooth"), [(200, 1), (100, 3), (20, 20)])
def test_a_comb_takes_no_more_steps_than_it_has_nodes(
    spine: int, tooth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each tooth took the spine's steps again they were a quarter of their square."""
    chain, teeth = combs(spine, tooth)
    tree = Tree(monkeypatch)
    tree.run(chain)
    assert tree.steps == spine
    tree.run(teeth)
    # No state but those of the chain's end was kept.
    assert tree.steps <= 2 * spine + len(teeth)
    tree.run([len(tree.slots) - 1])
    assert tree.steps <= 2 * spine + len(teeth) + 1


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10**6), size=st.integers(2, 250), chains=st.floats(0, 1))
def test_a_pass_takes_each_step_once(seed: int, size: int, chains: float) -> None:
    """Of any tree as large as memory is counted for; twice at most where the states that were kept
    of the pass before leave too little room."""
    random = Random(seed)
    parents = [
        i - 1 if random.random() < chains else random.randint(-1, i - 1) for i in range(size)
    ]
    before = random.randint(1, size - 1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        tree = Tree(monkeypatch)
        tree.run(parents[:before])
        assert tree.steps == before
        tree.run(parents[before:])
    needed = {slot for path in tree.slots[before:] for slot in path}
    assert tree.steps - before <= 2 * len(needed)


def test_a_state_that_is_gone_is_no_prefix() -> None:
    cache, other = StateCache(SHAPE), StateCache(SHAPE)
    nodes: list[Node] = []
    for slot in range(5):
        nodes.append(Node(slot, nodes[-1] if nodes else None))
        row = [Row(slot, slot, (slot,))]
        cache.windows(slot, row, nodes[-1].channels[None])
        cache.read(slot, row, nodes[-1].query[None], [nodes[-1].inputs])
    with pytest.raises(ValueError, match="not kept"):
        other.copy_prefix(cache, 2)
    with pytest.raises(ValueError, match="not kept"):
        cache.windows(2, [Row(2, 2, (2,))], nodes[2].channels[None])
    other.copy_prefix(cache, 5)
    row = [Row(5, 5, (5,))]
    after = Node(5, nodes[-1])
    for one in (cache, other):
        one.windows(5, row, after.channels[None])
        read = one.read(5, row, after.query[None], [after.inputs])
        assert torch.equal(read[0], after.read())


def test_a_value_is_added_at_the_key_that_heads_share() -> None:
    state, key, value = torch.ones(2, 1, 1), torch.tensor([[3.0]]), torch.tensor([[2.0], [5.0]])
    after = step(state, Inputs(key, value, torch.tensor([0.5, 0.25])))
    assert after.flatten().tolist() == [0.5 + 6, 0.25 + 15]


@pytest.fixture(
    scope="module", params=["qwen3.5", "lfm2", "nemotron-h", "falcon-h1", "kimi-linear"]
)
def make(tiny: Callable[..., Path], request: pytest.FixtureRequest) -> engines.MakeStages:
    stages = cut(open_checkpoint(tiny(request.param)), 2)
    return lambda _: stages


def test_conformance_with_states(make: engines.MakeStages) -> None:
    sampled = Sampling(temperature=0.8, top_p=0.95, seed=11)
    engines.check_tree_equals_sequential(
        make, VOCAB, 1, length=20, sampling=sampled, coalesced=True
    )
    engines.check_sessions_apart(make, VOCAB)
    engines.check_batches_equal_sequential(make, VOCAB, 0, (Sampling(), sampled), length=15)
    engines.check_begins_like_another(make, VOCAB, 1)
    for seed in range(3):
        engines.check_continues_an_answer(make, VOCAB, seed)


def test_steps_are_bounded_as_in_a_whole_text(tiny: Callable[..., Path]) -> None:
    """transformers bounds Mamba-2's time steps where it reads several tokens at once."""
    path = tiny("nemotron-h", time_step_min=1e-3, time_step_floor=1e-4)
    prompt = [5, 17, 99, 3, 64] * 8
    want = generated(path, prompt, 8, use_cache=False)
    assert decode(cut(open_checkpoint(path), 2), prompt, 8) == want


@pytest.mark.parametrize("family", ["lfm2", "nemotron-h", "falcon-h1", "kimi-linear"])
def test_memory_of_other_states_is_counted(family: str, tiny: Callable[..., Path]) -> None:
    path = tiny(family)
    info = inspect_checkpoint(path)
    assert not info.shares_prefixes
    stage = load_stage(open_checkpoint(path), 0, 3, mode="fast")
    foretold = footprint(path, info, (0, 3), "float32", "fast")
    assert foretold.session == stage.session_bytes > 0
    assert stage.cache_bytes(1) == foretold.slot > 0
    assert stage.shard.weight_bytes == pytest.approx(foretold.weights, rel=0.02)


@pytest.mark.parametrize("family", ["qwen3.5", "lfm2", "nemotron-h", "falcon-h1", "kimi-linear"])
def test_a_session_takes_the_memory_that_is_said_of_its_states(
    family: str, tiny: Callable[..., Path]
) -> None:
    """Behind a chunk of a prompt, with a state kept for others: all but one that is in the making,
    and what torch aligns."""
    stage = load_stage(open_checkpoint(tiny(family)), 0, 3, mode="fast")
    stage.run(Admit(SESSION, 512, Sampling(), kept_state=3))
    tokens = [i * 7 % 150 for i in range(UNCOMMITTED + 4)]
    stage.run(reference.chain(SESSION, 0, tokens[:4], None, ()))
    stage.run(reference.chain(SESSION, 4, tokens[4:], None, ()))
    cache = stage._sessions[SESSION].cache
    held = {
        x.untyped_storage().data_ptr(): x for states in cache.states.values() for x in kept(states)
    }
    total = sum(x.untyped_storage().nbytes() for x in held.values())
    assert 0.7 * stage.session_bytes < total <= stage.session_bytes


def kept(states: StateCache) -> Iterator[torch.Tensor]:
    """All tensors of a layer's states in a session."""
    yield from (states._state, states._window, *states._states.values(), *(states._kept or ()))
    yield from states._channels.values()
    for inputs in states._inputs.values():
        yield from (x for x in astuple(inputs) if x is not None)


def test_memory_of_states_is_counted(tiny: Callable[..., Path]) -> None:
    path = tiny("qwen3.5")
    info = inspect_checkpoint(path)
    assert not info.shares_prefixes
    stage = load_stage(open_checkpoint(path), 2, 5, mode="fast")
    foretold = footprint(path, info, (2, 5), "float32", "fast")
    assert foretold.session == stage.session_bytes > 3 * recurrent.KEPT_STATES * 4 * 16 * 24 * 4
    # Layers that keep nothing of a token still have its position.
    assert stage.cache_bytes(1) == 8
    assert stage.shard.weight_bytes == pytest.approx(foretold.weights, rel=0.02)
