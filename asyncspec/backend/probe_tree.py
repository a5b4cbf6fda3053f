"""What start-up self-tests compute twice: the rows of a path, alone and inside a tree."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from asyncspec.core.jobs import Row


class ProbePass(Struct, frozen=True):
    """One pass of such a test."""

    committed: int
    rows: list[Row]
    # Number of each row's input: those of the path, then as many for siblings.
    inputs: list[int]
    # The rows of the path.
    path_rows: list[int]
    # Slots to which the speculative region is compacted after the pass.
    keep: list[int] | None = None


class ProbeTree(Struct, frozen=True):
    """A path behind ``prefix`` committed rows, and siblings."""

    prefix: int
    # Number of siblings of each row of the path.
    siblings: tuple[int, ...]
    # Rows of the path, pass by pass.
    levels: tuple[tuple[int, ...], ...]
    # The pass after which siblings are pruned; None: they keep their slots.
    pruned_after: int | None = None

    def alone(self) -> Iterator[ProbePass]:
        """The path's rows, each committed before the next."""
        for i in range(len(self.siblings)):
            slot = self.prefix + i
            yield ProbePass(slot, [Row(slot, slot, (slot,))], [i], [0])

    def in_tree(self) -> Iterator[ProbePass]:
        """The same rows, each after siblings, in few passes. The path's row is the last of a pass
        wherever a level is: the last vector of a tensor is the partial one."""
        count, path, slot = len(self.siblings), list[int](), self.prefix
        for number, level in enumerate(self.levels):
            rows: list[Row] = []
            inputs: list[int] = []
            path_rows: list[int] = []
            for i in level:
                siblings = [count + (i + sibling) % count for sibling in range(self.siblings[i])]
                for index in (*siblings, i):
                    rows.append(Row(slot, self.prefix + i, (*path, slot)))
                    inputs.append(index)
                    slot += 1
                path.append(slot - 1)
                path_rows.append(len(rows) - 1)
            pruned = number == self.pruned_after
            yield ProbePass(self.prefix, rows, inputs, path_rows, [*path] if pruned else None)
            if pruned:
                slot = self.prefix + len(path)
                path = [*range(self.prefix, slot)]
