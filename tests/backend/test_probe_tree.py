"""The rows that start-up self-tests compute twice: the same path, alone and inside a tree."""

from __future__ import annotations

import pytest

from asyncspec.backend.probe_tree import ProbeTree

PREFIX = 5
SIBLINGS = (1, 0, 2, 3)
LEVELS = ((0,), (1, 2), (3,))


@pytest.mark.parametrize("pruned_after", [None, 0, 1])
def test_a_row_of_the_path_sees_the_path_alone(pruned_after: int | None) -> None:
    tree = ProbeTree(PREFIX, SIBLINGS, LEVELS, pruned_after)
    # Input by slot.
    held: dict[int, int] = {}
    path: list[int] = []
    for one in tree.in_tree():
        assert one.committed == PREFIX
        for row, given in zip(one.rows, one.inputs, strict=True):
            assert row.slot not in held
            held[row.slot] = given
            assert row.position == PREFIX + len(row.visible) - 1
            assert [held[slot] for slot in row.visible] == [*range(len(row.visible) - 1), given]
        path += [one.inputs[i] for i in one.path_rows]
        if one.keep is not None:
            held = {PREFIX + i: held[slot] for i, slot in enumerate(one.keep)}
            assert list(held.values()) == path
    assert path == [given for one in tree.alone() for given in one.inputs]
    assert sum(given >= len(SIBLINGS) for given in held.values()) == sum(
        count
        for number, level in enumerate(LEVELS)
        for count in (SIBLINGS[i] for i in level)
        if pruned_after is None or number > pruned_after
    )
