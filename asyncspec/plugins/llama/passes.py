"""Passes of llama.cpp over rows of trees: one cache, the sequences of all sessions in it.

In exact mode a row has the same bits whatever shares its pass, where the kernels allow it
(``self_test``). Attention adds up in the order of the cache's cells, so nothing may come before its
ancestors there: cells are taken in ascending order only, those of dead rows are kept by a sequence
of their own, and where there is no room left the cache is packed. Passes have at least ``min_rows``
rows and fewer than llama.cpp's tiles of attention.

Where there are more sessions than sequences, some are parked, those in the cache for longest first.
So are kept prompts when a session is admitted that does not go on from them: attention passes over
all cells up to the last one in use. The copy takes less time than a chunk of rows does, and memory
counts what is kept in full, wherever it is and whatever it shares.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncspec.plugins.llama.branches import Branches, Node
from asyncspec.plugins.llama.cache_engine import CacheEngine, Floats, with_ancestors


class Engine(CacheEngine[Branches]):
    """A model without recurrent layers and its cache."""

    def _new_session(self) -> Branches:
        return Branches(self, self.pool)

    def reserve(self, parent: Branches) -> None:
        """Have a sequence free for a session that begins like ``parent``, and that in the cache."""
        self.unpark(parent)
        self._free_sequences({parent: []}, 1)

    def park_kept(self, parent: Branches | None = None) -> None:
        used = {parent, *(branches.parent for branches in self.branches if not branches.is_kept)}
        for branches in self.branches:
            if branches.is_kept and not branches.is_parked and branches not in used:
                branches.park()
        self._close_gaps()

    def _free_one(self, branches: Branches) -> None:
        self._free_sequences({branches: []}, 1)

    def _some(
        self,
        rows: Sequence[tuple[Branches, Node]],
        wanted: Sequence[bool],
        captured: dict[str, list[Floats]],
        logits: list[Floats],
    ) -> None:
        """Rows for one pass, if there are sequences enough, else in halves."""
        whole, again = with_ancestors(rows)
        by_session: dict[Branches, list[Node]] = {}
        for branches, node in whole:
            by_session.setdefault(branches, []).append(node)
        fits = len(whole) <= self.most_rows and self._free_sequences(by_session)
        if not fits and len(rows) > 1:
            half = len(rows) // 2
            self._some(rows[:half], wanted[:half], captured, logits)
            self._some(rows[half:], wanted[half:], captured, logits)
            return
        if not fits and again:
            # A long path that was evicted: first its upper part.
            self._some(whole[: len(whole) // 2], [False] * (len(whole) // 2), {}, [])
            self._some(rows, wanted, captured, logits)
            return
        for branches in by_session:
            self.unpark(branches)
        members: dict[Node, list[int]] = {}
        for branches, nodes in by_session.items():
            members |= dict(zip(nodes, branches.attach(nodes), strict=True))
        try:
            self._pass([node for _, node in whole], members, [False] * again + [*wanted])
        except BaseException:
            for branches, nodes in by_session.items():
                branches.detach(set(nodes))
            raise
        for name, parts in captured.items():
            parts.append(self._captured[name][again : again + len(rows)])
        if any(wanted):
            logits.append(self._logits(sum(wanted)))

    def _free_sequences(self, users: dict[Branches, list[Node]], more: int = 0) -> bool:
        """Whether there are enough for the rows of ``users`` and ``more``, after others have given
        theirs. Sessions that have no more than one left are parked."""

        def lacking() -> int:
            missing = sum(branches.missing(nodes) for branches, nodes in users.items())
            return missing + more - len(self.pool)

        if lacking() <= 0:
            return True
        for branches in self.branches:
            if lacking() > 0 and branches not in users:
                branches.evict(lacking())
        for branches, nodes in users.items():
            if lacking() > 0:
                above = {n for node in nodes for n in branches.path(node) if n.cached}
                branches.evict(lacking(), above, spares=False)
        for branches in self.branches:
            if lacking() > 0 and branches not in users:
                branches.park()
        return lacking() <= 0
