"""Tokens by cache slot: what penalties count is a row's own path, and of it the answer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncspec.backend.tree_stage import SlotTokens
from asyncspec.core.jobs import Row
from asyncspec.core.kv_slots import SlotTable, allocate, reclaim
from asyncspec.core.liveness import Liveness
from asyncspec.core.sampling import seen
from asyncspec_protocol.ids import NO_PARENT, NodeId, Version
from asyncspec_protocol.messages import PruneIndices

PROMPT = 2


@given(
    st.lists(st.integers(0, 3), min_size=PROMPT, max_size=PROMPT),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=4, max_size=8),
    st.integers(0, 9),
)
def test_a_rows_counts_are_those_of_its_path(
    prompt: list[int], drafted: list[tuple[int, int]], accepted: int
) -> None:
    """A prompt and a tree in one pass, then one of its paths is accepted and a row goes below."""
    words = dict(enumerate([*prompt, *(token for _, token in drafted)]))
    parents = {0: NO_PARENT} | {n: n - 1 for n in range(1, PROMPT)}
    for node, (where, _) in enumerate(drafted, PROMPT):
        parents[node] = PROMPT - 1 + where % (node - PROMPT + 1)
    tokens, liveness = SlotTokens(PROMPT), Liveness(PROMPT)
    ids = list(map(NodeId, words))
    slots, rows = allocate(SlotTable(), ids, [NodeId(parents[n]) for n in ids], liveness.committed)
    tokens.write(0, rows, [words[n] for n in ids])
    for node, row in zip(ids, rows, strict=True):
        assert tokens.own(row) == seen(path(parents, words, node), PROMPT)
    tip = NodeId(PROMPT + accepted % len(drafted))
    line = [NodeId(n) for n in chain(parents, tip) if n >= PROMPT]
    prune = PruneIndices(0, Version(1), NodeId(len(ids)), tuple(line), ())  # type: ignore[arg-type]
    liveness, start = liveness.apply(prune), slots.committed
    slots, stay = reclaim(slots, liveness.committed, liveness.alive)
    if stay is not None:
        tokens.compact(start, stay)
    child, committed = NodeId(len(ids)), slots.committed
    words[child], parents[child] = 1, tip
    slots, rows = allocate(slots, [child], [tip], liveness.committed)
    tokens.write(committed, rows, [1])
    counts = {**tokens.counts, **tokens.own(rows[0])}
    assert counts == seen(path(parents, words, child), PROMPT)


@given(st.lists(st.integers(0, 3), min_size=8, max_size=8), st.lists(st.integers(0, 8)))
def test_an_earlier_pass_of_a_batch_counts_its_own_committed_path(
    words: list[int], committed: list[int]
) -> None:
    """All passes of a batch are written before the first of them draws."""
    tokens = SlotTokens(PROMPT)
    tokens.write(0, [Row(n, n, tuple(range(n + 1))) for n in range(len(words))], words)
    for length in committed:
        tokens.commit(length)
        assert tokens.counts == seen(words[:length], PROMPT)


def chain(parents: dict[int, int], node: int) -> list[int]:
    """A node and what is above it, the oldest first."""
    line = []
    while node != NO_PARENT:
        line.append(node)
        node = parents[node]
    return line[::-1]


def path(parents: dict[int, int], words: dict[int, int], node: int) -> list[int]:
    return [words[n] for n in chain(parents, node)]
