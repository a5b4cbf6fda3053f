"""The target's features of one session, on their way from verdicts to the token source.

An EAGLE head reads, for every committed token, what the target computed for the position before. A
feature is known with its node's verdict, and is the source's once the path has passed the node; it
is held until then, and forgotten when the node dies. The tip's own is not needed yet.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.jobs import Feed, TensorRows
from asyncspec_protocol.errors import LocalProtocolError, RemoteProtocolError
from asyncspec_protocol.ids import NodeId, SessionId
from asyncspec_protocol.messages import Verdict


class FeatureLog(Struct, frozen=True):
    """Features of one session that have been received, and how many the token source was fed."""

    # Prompt nodes before the last are committed from the start and are in no tree.
    prompt_length: int
    # One row for each live node with a verdict, the tip included.
    held: Mapping[NodeId, TensorRows] = {}
    # Committed positions before the tip, from 0 on, whose features are recorded, and those fed.
    recorded: int = 0
    fed: int = 0
    # Recorded rows that are not fed yet, oldest first.
    unfed: tuple[TensorRows, ...] = ()
    # Those of the first positions, for sessions with a common prefix, and the rows of the tensors
    # that they hold in memory: with a row all rows that came with it, also those of dead nodes. Of
    # an answer no more are kept than make ``most_retained`` of these.
    kept: tuple[TensorRows, ...] = ()
    retained: int = 0
    most_retained: int = 0
    keeps_more: bool = True
    # Rows of each held node's tensor.
    sizes: Mapping[NodeId, int] = {}

    @staticmethod
    def start(
        prompt_length: int,
        prefix: tuple[TensorRows, ...],
        retained: int = 0,
        most_retained: int = 0,
    ) -> FeatureLog:
        """The log of a session that takes over a common prefix with the features ``prefix``, which
        hold ``retained`` rows in memory."""
        log = FeatureLog(prompt_length, kept=prefix, retained=retained, most_retained=most_retained)
        return log._with_recorded(prefix)

    @staticmethod
    def passing(prompt_length: int) -> FeatureLog:
        """The log of a session whose features are for its user: later sessions find none."""
        return FeatureLog(prompt_length, keeps_more=False)

    @property
    def source_limit(self) -> int:
        """Tokens of the committed path that the source can commit."""
        return self.recorded + 1 if self.recorded else 0

    def receive(
        self, verdict: Verdict, handle: object | None, alive: Container[NodeId]
    ) -> FeatureLog:
        """Take the rows ``handle`` of a verdict; ``alive``: sent nodes of the tree. Raises
        ``RemoteProtocolError`` where they are not the features that come next."""
        last = self.prompt_length - 1
        prompt = tuple(node for node in verdict.feature_ids if node < last)
        if handle is None or verdict.feature_ids != prompt + verdict.ids:
            raise RemoteProtocolError(f"verdict without its features in session {verdict.session}")
        # Links keep order: what comes after the prompt comes when all of it has.
        end = self.recorded + len(prompt)
        if prompt != tuple(range(self.recorded, end)) or (verdict.ids and end < last):
            raise RemoteProtocolError(f"features of the prompt out of order: {prompt}")
        verified = enumerate(verdict.ids, len(prompt))
        held = {node: TensorRows(handle, (row,)) for row, node in verified if node in alive}
        size = len(verdict.feature_ids)
        sizes = {**self.sizes, **dict.fromkeys(held, size)}
        log = replace(self, held={**self.held, **held}, sizes=sizes)
        if not prompt:
            return log
        rows = TensorRows(handle, tuple(range(len(prompt))))
        if log.keeps_more:
            log = replace(log, kept=(*log.kept, rows), retained=log.retained + size)
        return log._with_recorded([rows])

    def advance(self, passed: Sequence[NodeId], tree: Container[NodeId]) -> FeatureLog:
        """Move the tip past the nodes ``passed``, oldest first; ``tree`` has the nodes that live.
        Raises ``LocalProtocolError`` where one of them has no features."""
        if not self.held.keys() >= set(passed):
            raise LocalProtocolError("the path has passed a node whose features are not known")
        held = {node: row for node, row in self.held.items() if node in tree}
        sizes = {node: size for node, size in self.sizes.items() if node in tree}
        log = replace(self._with_kept(passed), held=held, sizes=sizes)
        return log._with_recorded([self.held[node] for node in passed])

    def feed(self, session: SessionId) -> tuple[FeatureLog, Feed] | None:
        """The job that feeds the source the rows recorded since the last; None where there are
        none."""
        if not self.unfed:
            return None
        return replace(self, fed=self.recorded, unfed=()), Feed(session, self.fed, self.unfed)

    def _with_kept(self, passed: Sequence[NodeId]) -> FeatureLog:
        """Keep the features of an answer's next nodes, up to the first that memory is not counted
        for."""
        if not self.keeps_more:
            return self
        rows: list[TensorRows] = []
        last, retained = self.kept[-1].handle if self.kept else None, self.retained
        for node in passed:
            row = self.held[node]
            size = 0 if row.handle is last else self.sizes[node]
            if retained + size > self.most_retained:
                break
            rows.append(row)
            last, retained = row.handle, retained + size
        keeps_more, kept = len(rows) == len(passed), (*self.kept, *joined(rows))
        return replace(self, kept=kept, retained=retained, keeps_more=keeps_more)

    def _with_recorded(self, rows: Sequence[TensorRows]) -> FeatureLog:
        """Further positions of the committed path."""
        count = sum(len(some.rows) for some in rows)
        unfed = joined((*self.unfed, *rows))
        return replace(self, recorded=self.recorded + count, unfed=unfed)


def rows_between(rows: Sequence[TensorRows], start: int, end: int) -> tuple[TensorRows, ...]:
    """The rows of positions [start, end), where ``rows`` are those from position 0 on."""
    parts: list[TensorRows] = []
    first = 0
    for some in rows:
        cut = some.rows[max(0, start - first) : max(0, end - first)]
        if cut:
            parts.append(TensorRows(some.handle, cut))
        first += len(some.rows)
    return tuple(parts)


def joined(rows: Sequence[TensorRows]) -> tuple[TensorRows, ...]:
    """The same rows, with neighbours of one tensor together."""
    together: list[TensorRows] = []
    for some in rows:
        if together and together[-1].handle is some.handle:
            together[-1] = TensorRows(some.handle, together[-1].rows + some.rows)
        else:
            together.append(some)
    return tuple(together)
