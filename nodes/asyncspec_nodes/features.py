"""The target's features on their way from verdicts to the token source, for one session.

An EAGLE head reads, for every committed token, what the target computed for the position before.
A feature is known with its node's verdict and belongs to the source once the path has passed the
node; until then it is held, and forgotten when the node dies. The tip's own is never needed yet.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.jobs import Feed, Rows
from asyncspec_protocol.errors import LocalProtocolError, RemoteProtocolError
from asyncspec_protocol.ids import NodeId, SessionId
from asyncspec_protocol.messages import Verdict


class Features(Struct, frozen=True):
    """What has come back of the features of one session, and how far the source has them."""

    # Prompt nodes before the last are committed from the start and hang in no tree.
    prompt_length: int
    # Of live nodes, the tip included: one row each.
    held: Mapping[NodeId, Rows] = {}
    # Of committed positions before the tip: those known, all from 0 on, and those of them fed.
    known: int = 0
    fed: int = 0
    # The known ones that are not fed yet, oldest first.
    ready: tuple[Rows, ...] = ()

    @property
    def reach(self) -> int:
        """How many tokens of the committed path the source can be told of."""
        return self.known + 1 if self.known else 0


def note(
    features: Features, verdict: Verdict, handle: object | None, alive: Container[NodeId]
) -> Features:
    """Take the features of a verdict. ``alive``: nodes of the tree that were sent.

    Raises ``RemoteProtocolError`` where the features are not those that must come.
    """
    rows = {node: Rows(handle, (i,)) for i, node in enumerate(verdict.featured)}
    if handle is None or not rows.keys() >= set(verdict.ids):
        raise RemoteProtocolError(f"verdict without features in session {verdict.session}")
    last = features.prompt_length - 1
    prompt = tuple(node for node in verdict.featured if node < last)
    end = features.known + len(prompt)
    # Links keep order: what comes after the prompt comes when all of it has.
    if prompt != tuple(range(features.known, end)) or (len(rows) > len(prompt) and end < last):
        raise RemoteProtocolError(f"features of the prompt out of order: {prompt}")
    held = {node: row for node, row in rows.items() if node in alive}
    features = replace(features, held={**features.held, **held})
    return _known(features, _joined([rows[node] for node in prompt]), len(prompt))


def move(features: Features, passed: Sequence[NodeId], tree: Container[NodeId]) -> Features:
    """The tip has moved past ``passed``, oldest first; below it hangs ``tree``."""
    if not features.held.keys() >= set(passed):
        raise LocalProtocolError("the path has passed a node whose features are not known")
    rows = _joined([features.held[node] for node in passed])
    held = {node: row for node, row in features.held.items() if node in tree}
    return _known(replace(features, held=held), rows, len(passed))


def feed(features: Features, session: SessionId) -> tuple[Features, Feed] | None:
    """Give the source what it can have; None where there is nothing new."""
    if not features.ready:
        return None
    job = Feed(session, features.fed, features.ready)
    return replace(features, fed=features.known, ready=()), job


def _known(features: Features, rows: tuple[Rows, ...], count: int) -> Features:
    return replace(features, known=features.known + count, ready=(*features.ready, *rows))


def _joined(rows: Sequence[Rows]) -> tuple[Rows, ...]:
    """The same rows with those of one tensor, where they follow each other, taken together."""
    joined: list[Rows] = []
    for row in rows:
        if joined and joined[-1].handle is row.handle:
            joined[-1] = Rows(row.handle, joined[-1].rows + row.rows)
        else:
            joined.append(row)
    return tuple(joined)
