"""The cache table against what it is for: a row sees its ancestors, and nobody else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncspec.core.kv_slots import SlotTable, allocate, orphan, reclaim
from asyncspec.core.liveness import Liveness
from asyncspec_protocol.ids import NO_PARENT, NodeId, Version
from asyncspec_protocol.messages import PruneIndices

PROMPT = 3


@settings(max_examples=300)
@given(st.data())
def test_a_row_sees_its_ancestors_and_itself(data: st.DataObject) -> None:
    """Place, accept and prune at random; a naive cache of node ids follows the same jobs."""
    liveness = Liveness(prompt_length=PROMPT)
    slots, parent_of = SlotTable(), {}
    cache: dict[int, NodeId] = {}
    prompt = [NodeId(i) for i in range(PROMPT)]
    parents = [NodeId(i - 1) if i else NO_PARENT for i in range(PROMPT)]
    slots, rows = allocate(slots, prompt, parents, liveness.committed)
    for node, parent, row in zip(prompt, parents, rows, strict=True):
        parent_of[node], cache[row.slot] = parent, node
    path, next_id = list(prompt), PROMPT

    def ancestors(node: NodeId) -> set[NodeId]:
        line = {node}
        while (node := parent_of[node]) != NO_PARENT:
            line.add(node)
        return line

    for _ in range(data.draw(st.integers(1, 6))):
        live = [path[-1], *slots.speculative_nodes]
        ids = [NodeId(next_id + i) for i in range(data.draw(st.integers(1, 4)))]
        next_id += len(ids)
        chosen = [data.draw(st.sampled_from(live + ids[:i])) for i in range(len(ids))]
        committed = slots.committed
        slots, rows = allocate(slots, ids, chosen, liveness.committed)
        for node, parent, row in zip(ids, chosen, rows, strict=True):
            parent_of[node], cache[row.slot] = parent, node
        for node, row in zip(ids, rows, strict=True):
            seen = [cache[s] for s in (*range(committed), *row.visible)]
            assert set(seen) == ancestors(node)
            assert len(seen) == len(ancestors(node)) == row.position + 1
            assert list(row.visible) == sorted(row.visible)
        tip = data.draw(st.sampled_from(live + ids))
        walk = [n for n in sorted(ancestors(tip)) if n not in path]
        keep = [n for n in slots.speculative_nodes if tip in ancestors(n) and n != tip]
        path += walk
        prune = PruneIndices(
            session=0, version=Version(liveness.version + 1), horizon=NodeId(next_id),
            accepted=tuple(walk), keep=tuple(keep),
        )  # fmt: skip
        liveness = liveness.apply(prune)
        start = slots.committed
        slots, stay = reclaim(slots, liveness.committed, liveness.alive)
        if stay is not None:
            moved = [cache[s] for s in stay]
            cache = {s: n for s, n in cache.items() if s < start}
            cache.update({start + i: n for i, n in enumerate(moved)})
        assert [cache[s] for s in range(slots.committed)] == path
        assert set(cache.values()) == set(path) | set(keep)
        assert slots.used == len(cache)


@given(st.data())
def test_a_node_without_its_parent_is_found(data: st.DataObject) -> None:
    """Whatever is committed and freed."""
    count = data.draw(st.integers(1, 9))
    ids = [NodeId(PROMPT + i) for i in range(count)]
    parents = [NodeId(data.draw(st.integers(PROMPT - 1, n - 1))) for n in ids]
    nodes = st.frozensets(st.sampled_from(ids))
    committed, alive = data.draw(nodes), data.draw(nodes)
    nobody: frozenset[NodeId] = frozenset()
    slots, _ = allocate(SlotTable(PROMPT, NodeId(PROMPT - 1)), ids, parents, nobody.__contains__)
    slots, _ = reclaim(slots, committed.__contains__, (alive | committed).__contains__)
    held = slots.speculative
    lost = {n for n, one in held.items() if one.parent != slots.tip and one.parent not in held}
    node = orphan(slots)
    assert node in lost if lost else node is None


@pytest.mark.parametrize(("node", "parent"), [(9, 7), (9, 1), (3, 2), (4, 2)])
def test_allocate_refuses_missing_parents_and_known_nodes(node: int, parent: int) -> None:
    """Of a committed path only the tip has room below it."""
    committed = Liveness(prompt_length=PROMPT).committed
    ids = [NodeId(i) for i in range(5)]
    slots, _ = allocate(SlotTable(), ids, [NO_PARENT, *ids[:-1]], committed)
    with pytest.raises(ValueError, match="in the cache"):
        allocate(slots, [NodeId(node)], [NodeId(parent)], committed)


@given(
    st.builds(
        Liveness,
        prompt_length=st.integers(1, 4),
        horizon=st.integers(0, 12),
        accepted=st.frozensets(st.integers(0, 12), max_size=4),
        keep=st.frozensets(st.integers(0, 12), max_size=4),
    ),
    st.lists(st.integers(0, 14), min_size=1, max_size=8, unique=True),
)
def test_liveness_is_the_same_by_every_query(liveness: Liveness, numbers: list[int]) -> None:
    """Of a prompt, accepted, kept, or younger than the last prune: nobody else."""
    nodes = [NodeId(n) for n in numbers]
    named = {*range(liveness.prompt_length), *liveness.accepted, *liveness.keep}
    living = [n for n in nodes if n in named or n >= liveness.horizon]
    assert [n for n in nodes if liveness.alive(n)] == living
    assert [nodes[i] for i in liveness.living(nodes)] == living
    assert [n for n in nodes if liveness.holds(nodes)(n)] == living
    assert liveness.holds(())(nodes[0]) == (nodes[0] in living)


@given(st.permutations(range(1, 5)), st.integers(0, 3))
def test_prunes_are_idempotent_and_only_the_newest_counts(order: list[int], again: int) -> None:
    prunes = [
        PruneIndices(0, Version(v), NodeId(10 + v), (NodeId(v),), (NodeId(v + 1),)) for v in order
    ]
    liveness = Liveness(prompt_length=1)
    for prune in (*prunes, prunes[again]):
        liveness = liveness.apply(prune)
    assert liveness.version == 4
    assert liveness.keep == {5}


def test_fig_3_accepted_and_retained_indices() -> None:
    """FlowSpec Fig. 3: of a sequence 0..7, accepted {0, 1} and draft {3, 6, 7} stay."""
    ids = [NodeId(i) for i in range(1, 9)]
    parents = [NodeId(p) for p in (0, 1, 1, 2, 2, 3, 4, 4)]
    liveness = Liveness(prompt_length=1)
    slots, _ = allocate(SlotTable(), [NodeId(0)], [NO_PARENT], liveness.committed)
    slots, _ = allocate(slots, ids, parents, liveness.committed)
    prune = PruneIndices(
        0, Version(1), NodeId(9), (NodeId(1), NodeId(2)), tuple(map(NodeId, (4, 7, 8)))
    )
    liveness = liveness.apply(prune)
    slots, stay = reclaim(slots, liveness.committed, liveness.alive)
    assert stay == (1, 2, 4, 7, 8)
    assert slots.committed == 3
    assert slots.speculative_nodes == (4, 7, 8)


class Counted(int):
    """A node id that counts how often a table is asked for it."""

    asked = 0

    def __hash__(self) -> int:
        Counted.asked += 1
        return int.__hash__(self)


def looks(context: int, live: int, rows: int) -> tuple[int, int]:
    """How often ids are looked up for a segment and for a prune, after ``context`` committed nodes
    and with ``live`` others in the tail, which has been moved once."""
    ids = [NodeId(Counted(i)) for i in range(context + 2 * live + rows)]
    path, dead, kept = ids[:context], ids[context : context + live], ids[context + live : -rows]
    slots, _ = allocate(SlotTable(), path, [NO_PARENT, *path[:-1]], set(path).__contains__)
    nobody: frozenset[NodeId] = frozenset()
    slots, _ = allocate(slots, [*dead, *kept], [path[-1]] * (2 * live), nobody.__contains__)
    alive = set(kept)
    Counted.asked = 0
    slots, stay = reclaim(slots, nobody.__contains__, alive.__contains__)
    assert stay is not None
    pruned, Counted.asked = Counted.asked, 0
    allocate(slots, ids[-rows:], kept[:rows], nobody.__contains__)
    return Counted.asked, pruned


@pytest.mark.parametrize(("live", "rows"), [(16, 1), (16, 16), (200, 16)])
def test_work_grows_with_rows_and_live_nodes_and_not_with_the_context(live: int, rows: int) -> None:
    segment, prune = looks(2000, live, rows)
    assert (segment, prune) == looks(20, live, rows)
    assert prune <= 4 * live  # twice as many were in the tail
    assert segment <= live + 8 * rows
