"""GGUF models with recurrent layers: whole and in stages, plainly and in trees, against llama.cpp's
own text of the whole file."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.backend.base import EngineOptions
from asyncspec.backend.reference import SESSION, chain, decode
from asyncspec.core.errors import CheckpointError
from asyncspec.core.jobs import Admit, Release, Trim
from asyncspec.core.sampling import Sampling
from asyncspec.plugins.llama.backend import BACKEND
from asyncspec.plugins.llama.branches import Node, Pool
from asyncspec.plugins.llama.cut import cut, refused
from asyncspec.plugins.llama.footprint import footprint, slot_bytes
from asyncspec.plugins.llama.stage import LlamaStage, load_stage
from asyncspec.plugins.llama.states import States
from asyncspec.plugins.llama.target import open_target
from asyncspec.testing import engines
from asyncspec_protocol.ids import SessionId
from backend.gguf_models import VOCAB, own_greedy, save_random
from backend.recurrent_ggufs import KINDS, save_recurrent

CPU = EngineOptions(device="cpu")
PROMPT = [3 + i * 7 % 150 for i in range(100)]
LEAD = 0.05
"""Of a token's logit over the next one's, that rounding does not turn around."""


def stages_of(path: Path, edges: Sequence[int]) -> list[LlamaStage]:
    target = open_target(path)
    return [load_stage(target, *span, options=CPU) for span in pairwise(edges)]


def thirds(family: str) -> list[int]:
    layers = len(KINDS[family])
    return [0, layers // 3, 2 * layers // 3, layers]


@pytest.mark.parametrize("family", KINDS)
def test_stages_write_what_llama_cpp_does(family: str, tmp_path: Path) -> None:
    path, seed = tmp_path / "model.gguf", 0
    while True:
        want, lead = own_greedy(save_recurrent(path, family, seed), PROMPT, 8)
        if lead > LEAD:
            break
        seed += 1
    cuts = [[0, len(KINDS[family])]] + ([] if family == "mamba2" else [thirds(family)])
    for edges in cuts:
        stages = stages_of(path, edges)
        assert {stage.guarantee for stage in stages} == {"tolerance"}
        assert decode(stages, PROMPT, 8) == want


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", [family for family in KINDS if family != "mamba2"])
def test_what_every_engine_must_do(family: str, tmp_path: Path) -> None:
    engines.check_engine(str(save_recurrent(tmp_path / "model.gguf", family)), seeds=1)


@pytest.mark.parametrize("count", [2, 3])
def test_few_sequences(count: int, tmp_path: Path) -> None:
    """Snapshots are given up and sessions parked, and rows computed again."""
    stages = stages_of(save_recurrent(tmp_path / "model.gguf", "lfm2"), [0, 2, 6])
    for stage in stages:
        stage.engine.pool = Pool(count)
    samplings = [Sampling(), Sampling(temperature=0.8, seed=3), Sampling(repetition_penalty=1.4)]
    for seed in range(1):
        engines.check_tree_equals_sequential(lambda _: stages, VOCAB, seed, length=25)
        engines.check_batches_equal_sequential(lambda _: stages, VOCAB, seed, samplings)
    for stage in stages:
        stage.check()
        assert len(stage.engine.pool) == count


@pytest.mark.parametrize("count", [2, 6])
@pytest.mark.parametrize("family", ["qwen35", "nemotron_h"])
def test_sessions_begin_where_a_state_is_kept(family: str, count: int, tmp_path: Path) -> None:
    """At the border of a prompt that is being answered, which is no chunk's end, and of one that is
    over, and at its end; what was taken over is not computed again."""
    layers, border, last = len(KINDS[family]), 64, len(PROMPT) - 1
    path, seed = tmp_path / "model.gguf", 0
    while own_greedy(save_recurrent(path, family, seed), PROMPT, 1)[1] <= LEAD:
        seed += 1
    (stage,) = stages_of(path, [0, layers])
    stage.engine.pool = Pool(count)
    want = decode([stage], PROMPT, 1)

    def begin(session: int, parent: int, shared: int) -> Any:
        job = Admit(
            SessionId(session),
            len(PROMPT),
            Sampling(),
            parent_session=SessionId(parent),
            common_prefix=shared,
            kept_state=max(border, shared),
        )
        stage.run(job)
        return stage._sessions[SessionId(session)].cache.branches

    def answer(session: int, start: int) -> list[int]:
        for at in range(start, last, 30):
            stage.run(chain(SessionId(session), at, PROMPT[at : min(at + 30, last)], None, ()))
        return [*stage.run(chain(SessionId(session), last, PROMPT[last:], None, (0,)))]  # type: ignore[misc]

    begin(1, -1, 0)
    assert answer(1, 0) == want
    for session, parent in ((2, 1), (3, 2)):  # the second's own border is where it began
        assert begin(session, parent, border).trunk == border
        assert answer(session, border) == want
    with pytest.raises(ValueError, match="after 70 tokens is not kept"):
        begin(4, 1, 70)
    for session in (1, 2, 3):
        stage.run(Trim(SessionId(session), last))
    assert len(stage.engine.pool) == count
    for session, parent, shared in ((5, 3, border), (6, 1, last), (7, 6, last)):
        assert begin(session, parent, shared).trunk == shared
        assert answer(session, shared) == want
    for session in (1, 2, 3, 5, 6, 7):
        stage.run(Release(SessionId(session)))
    assert len(stage.engine.pool) == count


def test_a_cache_that_grows(tmp_path: Path) -> None:
    """States and keys move on to a larger one."""
    target = open_target(save_recurrent(tmp_path / "model.gguf", "qwen35"))
    small, large = (load_stage(target, 0, 2, options=CPU) for _ in range(2))
    large.engine._move(4096)
    cells = small.engine.cells
    results: list[Any] = []
    for stage in (small, large):
        stage.run(Admit(SESSION, 1500, Sampling()))
        for start in range(0, 1500, 60):
            tokens = [i * 11 % VOCAB for i in range(start, start + 60)]
            rows = stage.run(chain(SESSION, start, tokens, None, ()))
        results.append(rows)
    assert small.engine.cells > cells
    np.testing.assert_allclose(results[0], results[1], atol=0.05)


def test_layers_of_one_kind_are_no_stage(tmp_path: Path) -> None:
    """llama.cpp asks for keys and for states of every part."""
    model = open_target(save_recurrent(tmp_path / "model.gguf", "nemotron_h")).model
    spans = [(0, 2), (1, 3), (0, 3), (2, 5), (0, 9)]
    assert {*refused(model, spans)} == {(0, 2), (1, 3)}
    with pytest.raises(CheckpointError, match="cannot be cut into stages"):
        stages_of(save_recurrent(tmp_path / "mamba.gguf", "mamba2"), [0, 2, 4])


def test_sections_of_positions_are_not_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the model is deep."""
    monkeypatch.setitem(KINDS, "qwen35", "sasa")
    model = open_target(save_recurrent(tmp_path / "model.gguf", "qwen35")).model
    metadata, _ = cut(model, 0, 2)
    assert metadata["qwen35.rope.dimension_sections"].get() == [2, 2, 2, 0]


def test_memory_counts_states(tmp_path: Path) -> None:
    target = open_target(save_recurrent(tmp_path / "model.gguf", "qwen35"))
    stage = load_stage(target, 0, 6, options=CPU)
    taken = footprint(target, (0, 6))
    engine = stage.engine
    tree = stage.new_cache(8)
    node = Node(None, 0, 5)
    tree.branches.settle(tree.branches.fork(None, node))  # type: ignore[attr-defined]
    assert not stage.info.shares_prefixes
    assert stage.info.keeps_states
    assert stage.session_bytes == taken.session > 0
    # Two of a session may be outside the cache: at a border of its prompt, and at its end.
    assert taken.results >= taken.states == engine.settings.sequences * taken.session // 2
    attention = footprint(open_target(save_random(tmp_path / "other.gguf", "qwen3")), (0, 3))
    # Half of the layers have keys and values, which are kept at the border besides.
    assert taken.slot == attention.slot * 3.5 / 2.5
    assert BACKEND.footprints(str(target.path), [(0, 2)], stage_options())[0].session


@pytest.mark.parametrize("family", ["lfm2", "qwen35", "nemotron_h", "granitehybrid", "falcon-h1"])
def test_states_take_what_memory_says(family: str, tmp_path: Path) -> None:
    """What llama.cpp writes of a sequence is its states, its keys and values, and a few numbers."""
    target = open_target(save_recurrent(tmp_path / "model.gguf", family))
    layers = len(KINDS[family])
    stage, count = load_stage(target, 0, layers, options=CPU), 40
    stage.run(Admit(SESSION, count, Sampling()))
    stage.run(chain(SESSION, 0, [i * 11 % VOCAB for i in range(count)], None, ()))
    engine, taken = stage.engine, footprint(target, (0, layers))
    written = max(engine.save(sequence)[1][0].size for sequence in range(engine.settings.sequences))
    states = written - count * slot_bytes(target, (0, layers), "auto")
    foretold = taken.states // engine.settings.sequences
    assert 0 <= states - foretold < 0.02 * foretold + 100 * count
    assert taken.session == 2 * foretold


def stage_options() -> Any:
    from asyncspec.backend.base import StageOptions

    return StageOptions()


# --- The sequences, by themselves.


class Sequences:
    """A cache that knows what every sequence ends at, and refuses what llama.cpp would."""

    def __init__(self) -> None:
        self.lengths: dict[int, int] = {}

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        assert target not in self.lengths
        assert start == 0
        assert self.lengths[source] == end, "a state of another row"
        self.lengths[target] = end

    def remove(self, sequence: int, start: int) -> None:
        assert start == 0, "a state cannot be cut back"
        self.lengths.pop(sequence, None)

    def save(self, sequence: int) -> int:
        return self.lengths[sequence]

    def restore(self, sequence: int, saved: int) -> None:
        assert sequence not in self.lengths
        self.lengths[sequence] = saved


@given(st.data())
def test_snapshots_are_of_their_nodes(data: st.DataObject) -> None:
    """Whatever is forked, taken, dropped, committed, pruned, evicted or parked, a cached node's
    sequence ends at it, and every sequence is free or held."""
    memory, pool = Sequences(), Pool(5)
    states = States(memory, pool)
    nodes: list[Node] = []
    for _ in range(data.draw(st.integers(1, 30))):
        cached = [node for node in nodes if node.cached]
        match data.draw(st.sampled_from(["grow", "advance", "prune", "evict", "park"])):
            case "grow":
                start = data.draw(st.sampled_from([None, *cached]))
                above, chain = start, list[Node]()
                for _ in range(data.draw(st.integers(1, 3))):
                    position = states.trunk if above is None else above.position + 1
                    above = Node(above, position, 0)
                    chain.append(above)
                end = chain[-1]
                if states.is_parked or not pool:
                    continue
                if start is not None and data.draw(st.booleans()):
                    sequence = states.take(start, end)
                else:
                    sequence = states.fork(start, end)
                assert memory.lengths.get(sequence, 0) == chain[0].position
                if data.draw(st.booleans()):
                    memory.lengths[sequence] = end.position + 1
                    states.settle(sequence)
                    nodes += chain
                else:
                    states.drop(sequence)
            case "advance" if cached:
                tip = data.draw(st.sampled_from(cached))
                path = [*states.path(tip)][::-1]
                states.advance(path)
                nodes = [n for n in nodes if n.position >= states.trunk and tip in lineage(n)]
            case "prune":
                alive = {n for n in nodes if data.draw(st.booleans())}
                states.prune(alive)
            case "evict":
                states.evict(data.draw(st.integers(0, 3)), cached[:1])
                assert not cached or cached[0].cached
            case "park":
                if states.is_parked and pool:
                    states.unpark()
                elif not states.is_parked:
                    states.park()
            case _:
                pass
        states.check(nodes)
        for node in nodes:
            if node.cached:
                assert memory.lengths[node.sequence] == node.position + 1
        assert len(pool) + len(memory.lengths) == 5
    states.close()
    assert len(pool) == 5


def lineage(node: Node) -> list[Node]:
    above = [node]
    while above[-1].parent is not None:
        above.append(above[-1].parent)
    return above
