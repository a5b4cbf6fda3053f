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
    # Those of the prompt but for its last token: for sessions with a common prefix.
    prompt: tuple[TensorRows, ...] = ()

    @staticmethod
    def start(prompt_length: int, prefix: tuple[TensorRows, ...]) -> FeatureLog:
        """The log of a session that takes over a common prefix with the features ``prefix``."""
        return FeatureLog(prompt_length, prompt=prefix)._with_recorded(prefix)

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
        log = replace(self, held={**self.held, **held})
        if not prompt:
            return log
        rows = TensorRows(handle, tuple(range(len(prompt))))
        return replace(log, prompt=(*log.prompt, rows))._with_recorded([rows])

    def advance(self, passed: Sequence[NodeId], tree: Container[NodeId]) -> FeatureLog:
        """Move the tip past the nodes ``passed``, oldest first; ``tree`` has the nodes that live.
        Raises ``LocalProtocolError`` where one of them has no features."""
        if not self.held.keys() >= set(passed):
            raise LocalProtocolError("the path has passed a node whose features are not known")
        held = {node: row for node, row in self.held.items() if node in tree}
        return replace(self, held=held)._with_recorded([self.held[node] for node in passed])

    def feed(self, session: SessionId) -> tuple[FeatureLog, Feed] | None:
        """The job that feeds the source the rows recorded since the last; None where there are
        none."""
        if not self.unfed:
            return None
        return replace(self, fed=self.recorded, unfed=()), Feed(session, self.fed, self.unfed)

    def _with_recorded(self, rows: Sequence[TensorRows]) -> FeatureLog:
        """Further positions of the committed path; neighbouring rows of one tensor are joined."""
        unfed = list(self.unfed)
        for some in rows:
            if unfed and unfed[-1].handle is some.handle:
                unfed[-1] = TensorRows(some.handle, unfed[-1].rows + some.rows)
            else:
                unfed.append(some)
        count = sum(len(some.rows) for some in rows)
        return replace(self, recorded=self.recorded + count, unfed=tuple(unfed))
