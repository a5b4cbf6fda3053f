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
    # Those of the prompt but for its last token, all of them: for sessions that begin alike.
    prompt: tuple[Rows, ...] = ()

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
    last = features.prompt_length - 1
    prompt = tuple(node for node in verdict.featured if node < last)
    if handle is None or verdict.featured != prompt + verdict.ids:
        raise RemoteProtocolError(f"verdict without its features in session {verdict.session}")
    # Links keep order: what comes after the prompt comes when all of it has.
    end = features.known + len(prompt)
    if prompt != tuple(range(features.known, end)) or (verdict.ids and end < last):
        raise RemoteProtocolError(f"features of the prompt out of order: {prompt}")
    judged = enumerate(verdict.ids, len(prompt))
    held = {node: Rows(handle, (row,)) for row, node in judged if node in alive}
    features = replace(features, held={**features.held, **held})
    if not prompt:
        return features
    rows = Rows(handle, tuple(range(len(prompt))))
    return _known(replace(features, prompt=(*features.prompt, rows)), [rows])


def begun(prompt_length: int, shared: tuple[Rows, ...]) -> Features:
    """Those of a session that takes over the beginning of another, ``shared`` being what is known
    of it."""
    return _known(Features(prompt_length, prompt=shared), shared)


def move(features: Features, passed: Sequence[NodeId], tree: Container[NodeId]) -> Features:
    """The tip has moved past ``passed``, oldest first; below it hangs ``tree``."""
    if not features.held.keys() >= set(passed):
        raise LocalProtocolError("the path has passed a node whose features are not known")
    held = {node: row for node, row in features.held.items() if node in tree}
    return _known(replace(features, held=held), [features.held[node] for node in passed])


def feed(features: Features, session: SessionId) -> tuple[Features, Feed] | None:
    """Give the source what it can have; None where there is nothing new."""
    if not features.ready:
        return None
    job = Feed(session, features.fed, features.ready)
    return replace(features, fed=features.known, ready=()), job


def _known(features: Features, rows: Sequence[Rows]) -> Features:
    """Some more positions of the committed path. Rows of one tensor that follow each other are
    taken together."""
    ready = list(features.ready)
    for some in rows:
        if ready and ready[-1].handle is some.handle:
            ready[-1] = Rows(some.handle, ready[-1].rows + some.rows)
        else:
            ready.append(some)
    count = sum(len(some.rows) for some in rows)
    return replace(features, known=features.known + count, ready=tuple(ready))
