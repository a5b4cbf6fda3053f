"""The target's features on their way from verdicts to the token source, for one session.

An EAGLE head reads, for every committed token, what the target computed for the position before.
A feature is known with its node's verdict and belongs to the source once the path has passed the
node; until then it is held, and forgotten when the node dies. The tip's own is never needed yet.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core import tree as trees
from asyncspec.core.accept import TargetOutput
from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.cost_model.pipeline import RoundTripProbe
from asyncspec.core.jobs import Feed, TensorRows
from asyncspec.core.machine import Request
from asyncspec.core.tree import TokenTree
from asyncspec.policy.base import Growth, Policy, View, max_tree_nodes
from asyncspec_nodes.roles.draft.stats import Counters, TurnClock
from asyncspec_protocol.errors import LocalProtocolError, RemoteProtocolError
from asyncspec_protocol.ids import NodeId, SegmentId, SessionId, Version
from asyncspec_protocol.messages import Expand, Rates, Verdict


class Features(Struct, frozen=True):
    """What has come back of the features of one session, and how far the source has them."""

    # Prompt nodes before the last are committed from the start and hang in no tree.
    prompt_length: int
    # Of live nodes, the tip included: one row each.
    held: Mapping[NodeId, TensorRows] = {}
    # Of committed positions before the tip: those known, all from 0 on, and those of them fed.
    known: int = 0
    fed: int = 0
    # The known ones that are not fed yet, oldest first.
    ready: tuple[TensorRows, ...] = ()
    # Those of the prompt but for its last token, all of them: for sessions that begin alike.
    prompt: tuple[TensorRows, ...] = ()

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
    prompt = tuple(node for node in verdict.feature_ids if node < last)
    if handle is None or verdict.feature_ids != prompt + verdict.ids:
        raise RemoteProtocolError(f"verdict without its features in session {verdict.session}")
    # Links keep order: what comes after the prompt comes when all of it has.
    end = features.known + len(prompt)
    if prompt != tuple(range(features.known, end)) or (verdict.ids and end < last):
        raise RemoteProtocolError(f"features of the prompt out of order: {prompt}")
    verified = enumerate(verdict.ids, len(prompt))
    held = {node: TensorRows(handle, (row,)) for row, node in verified if node in alive}
    features = replace(features, held={**features.held, **held})
    if not prompt:
        return features
    rows = TensorRows(handle, tuple(range(len(prompt))))
    return _known(replace(features, prompt=(*features.prompt, rows)), [rows])


def begun(prompt_length: int, shared: tuple[TensorRows, ...]) -> Features:
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


def _known(features: Features, rows: Sequence[TensorRows]) -> Features:
    """Some more positions of the committed path. Rows of one tensor that follow each other are
    taken together."""
    ready = list(features.ready)
    for some in rows:
        if ready and ready[-1].handle is some.handle:
            ready[-1] = TensorRows(some.handle, ready[-1].rows + some.rows)
        else:
            ready.append(some)
    count = sum(len(some.rows) for some in rows)
    return replace(features, known=features.known + count, ready=tuple(ready))


# --- One session at the draft node: the committed path, the tree below it, and what is known of
# it.
# Every function on a session, here and in ``verdicts``, ``drafting`` and ``sending``, returns the
# next one; messages to send come beside it. Which session may send, and to whom, is the machine's
# business.

NOBODY = SessionId(-1)


class Asked(Struct, frozen=True):
    """What the token source is working on."""

    job: Expand
    growth: Growth | None
    # Of the version, the round, the turn and the committed path it was asked in.
    version: Version
    round: int
    turn: float
    length: int
    # The source was told to stop: the tree it grows hangs below a tip that is gone.
    abandoned: bool = False


class DraftSession(Struct, frozen=True):
    """The state of one session. Prompt nodes have the ids 0..len(prefix)-1."""

    session: SessionId
    request: Request
    policy: Policy
    stages: int
    # What this session processes as its prompt: the user's, and what was given before a failure.
    prefix: tuple[int, ...]
    # Tokens given to the user by earlier sessions of this request, and by this one.
    before: tuple[int, ...]
    tree: TokenTree
    # Live nodes that were not sent yet, oldest first.
    unsent: tuple[NodeId, ...]
    # The session whose prompt this one began with; -1: none.
    like: SessionId
    # The node before the root on the committed path.
    root_parent: NodeId
    next_node: NodeId
    committed: tuple[int, ...] = ()
    # Prompt nodes sent so far.
    prefilled: int = 0
    # Rows of their chunks; 0: not known yet.
    chunk_rows: int = 0
    # Live nodes that were sent, and the verdicts of live nodes.
    sent: frozenset[NodeId] = frozenset()
    verified: Mapping[NodeId, TargetOutput] = {}
    next_segment: SegmentId = SegmentId(0)
    version: Version = Version(0)
    # Committed nodes that some stage may not know as such, with the version that said so.
    announced: tuple[tuple[NodeId, Version], ...] = ()
    # Smallest version that every stage had applied when the last verdict passed it.
    acknowledged: Version = Version(0)
    # The token source: what it works on, how much of the path it knows, how deep it was asked.
    asked: Asked | None = None
    # Number of the last batch it was in: who has waited longest is the first in the next one.
    batch: int = 0
    source_length: int = 0
    last_depth: int = 0
    # The last question that brought nothing: as long as the tree is the same it is not repeated.
    no_growth: tuple[Growth, Version, NodeId] | None = None
    # What the token source reads of the target beside the tokens; None where it wants nothing.
    features: Features | None = None
    # Rounds begun after the one whose root is the prompt's last token.
    round: int = 0
    # Of this round: segments sent, trees received.
    segments: int = 0
    drafts: int = 0
    # Levels below the tip when it last moved.
    initial_depth: int = 0
    # The first of these segments, while its verdict has not come.
    probe: RoundTripProbe | None = None
    clock: TurnClock = TurnClock()
    # Rows its next segment should have at most, and those of the last one.
    tree_budget: int = PARAMETERS.max_rows
    rows: int = 0
    # Tokens of its drafts by the first stage's plan; 0: there is none. What of it the first stage
    # was told last, and when its last segment went out (``measuring``).
    planned_length: int = 0
    told: Rates | None = None
    sent_at: float = 0.0
    counters: Counters = Counters()

    @property
    def given(self) -> tuple[int, ...]:
        """All new tokens the user has."""
        return self.before + self.committed

    @property
    def new_tokens(self) -> int:
        """How many they are."""
        return len(self.before) + len(self.committed)

    def path(self, start: int, end: int) -> tuple[int, ...]:
        """Tokens of the committed path at the positions from ``start`` up to ``end``, without a
        look at the others."""
        begun = len(self.prefix)
        if start >= begun:
            return self.committed[start - begun : end - begun]
        return self.prefix[start:end] + self.committed[: max(0, end - begun)]

    @property
    def answering(self) -> bool:
        """Whether its prompt has been read: its first token is there."""
        return bool(self.committed)

    @property
    def length(self) -> int:
        """Tokens on the committed path."""
        return len(self.prefix) + len(self.committed)

    @property
    def reach(self) -> int:
        """Tokens of the committed path that the token source can be told of."""
        return self.length if self.features is None else self.features.reach

    @property
    def max_tree_nodes(self) -> int:
        """Nodes that its tree is held to, the root not counted."""
        return max_tree_nodes(self.policy, self.stages)

    @property
    def levels(self) -> int:
        """Levels of the tree below its root."""
        return self.tree.bottom - self.tree.nodes[self.tree.root].position

    @property
    def tops(self) -> int:
        """Likeliest tokens that come with every verdict: those its policy decides by, else those
        its user asks for."""
        return self.policy.top_logprobs or self.request.top_logprobs

    @property
    def last_position(self) -> int:
        """The deepest position whose verdict can still be part of the answer."""
        return len(self.request.prompt) + self.request.max_new_tokens - 2


def open_session(
    session: SessionId,
    request: Request,
    policy: Policy,
    stages: int,
    given: tuple[int, ...],
    counters: Counters,
    *,
    featured: bool = False,
    like: SessionId = NOBODY,
    shared: int = 0,
    features: tuple[TensorRows, ...] = (),
) -> DraftSession:
    """A session that goes on after the tokens ``given`` so far. ``featured``: its token source
    reads features of the target. The stages have ``shared`` tokens of the prompt already, of the
    session ``like``, and these are their ``features``."""
    prefix = request.prompt + given
    last = NodeId(len(prefix) - 1)
    return DraftSession(
        session=session,
        request=request,
        policy=policy,
        stages=stages,
        prefix=prefix,
        before=given,
        tree=trees.new_tree(last, prefix[-1], len(prefix) - 1),
        unsent=(last,),
        like=like,
        root_parent=NodeId(len(prefix) - 2),
        next_node=NodeId(len(prefix)),
        prefilled=shared,
        features=begun(len(prefix), features) if featured else None,
        counters=replace(
            counters,
            sessions=counters.sessions + 1,
            shared=counters.shared + shared,
        ),
    )


def keep(session: DraftSession, kept: int) -> DraftSession:
    """A session that is over, as if it had given the first ``kept`` of its tokens and no more."""
    before = session.before[:kept]
    return replace(session, before=before, committed=session.committed[: kept - len(before)])


def view(session: DraftSession, *, starving: bool = False) -> View:
    """The session as its policy sees it."""
    tree = session.tree
    return View(
        tree=tree,
        unsent=session.unsent,
        pending=len(session.sent) - len(session.verified),
        stages=session.stages,
        segments=session.segments,
        trees_received=session.drafts,
        tokens_since_draft=session.length - session.source_length,
        last_depth=session.last_depth,
        first_stage_idle=starving,
        levels_left=max(0, session.last_position - tree.nodes[tree.root].position),
        max_rows=session.tree_budget,
        draft_length=session.planned_length,
        initial_depth=session.initial_depth,
        no_growth=session.no_growth is not None
        and session.no_growth[1:] == (session.version, session.next_node),
    )
