"""One session at the draft node: the committed path, the tree below it, and what is known of it.

Every function takes a session and returns the next one; messages to send come beside it. Which
session may send, and to whom, is the draft machine's business (``draft.py``).
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from asyncspec import tree as trees
from asyncspec.accept import walk
from asyncspec.actor.machine import Request
from asyncspec.jobs import Feed
from asyncspec.policy import Growth, Policy, View
from asyncspec.segment import connected
from asyncspec.tree import TokenTree
from asyncspec_nodes.machines.draft import features as feature_books
from asyncspec_nodes.machines.draft.counters import Counters, TurnClock
from asyncspec_nodes.machines.draft.features import Features
from asyncspec_protocol.errors import LocalProtocolError, RemoteProtocolError
from asyncspec_protocol.ids import NO_PARENT, NodeId, SegmentId, SessionId, Version
from asyncspec_protocol.messages import Expand, Expanded, PruneIndices, Segment, Verdict


class Asked(Struct, frozen=True):
    """What the token source is working on."""

    job: Expand
    growth: Growth | None
    # Of the version, the round, the turn and the committed path it was asked in.
    version: Version
    round: int
    turn: int
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
    # The node before the root on the committed path.
    root_parent: NodeId
    next_node: NodeId
    committed: tuple[int, ...] = ()
    # Prompt nodes sent so far.
    prefilled: int = 0
    # Live nodes that were sent, and the verdicts of live nodes.
    sent: frozenset[NodeId] = frozenset()
    judged: Mapping[NodeId, int] = {}
    next_segment: SegmentId = SegmentId(0)
    version: Version = Version(0)
    # Committed nodes that some stage may not know as such, with the version that said so.
    announced: tuple[tuple[NodeId, Version], ...] = ()
    # Smallest version that every stage had applied when the last verdict passed it.
    acknowledged: Version = Version(0)
    # The token source: what it works on, how much of the path it knows, how deep it was asked.
    asked: Asked | None = None
    source_length: int = 0
    last_depth: int = 0
    # The last question that brought nothing: as long as the tree is the same it is not repeated.
    barren: tuple[Growth, Version, NodeId] | None = None
    # What the token source reads of the target beside the tokens; None where it wants nothing.
    features: Features | None = None
    # 0 while the prompt is processed, then 1, 2, ...
    round: int = 0
    # Of this round: segments sent, trees received.
    segments: int = 0
    drafts: int = 0
    clock: TurnClock = TurnClock()
    counters: Counters = Counters()

    @property
    def given(self) -> tuple[int, ...]:
        """All new tokens the user has."""
        return self.before + self.committed

    @property
    def length(self) -> int:
        """Tokens on the committed path."""
        return len(self.prefix) + len(self.committed)

    @property
    def reach(self) -> int:
        """Tokens of the committed path that the token source can be told of."""
        return self.length if self.features is None else self.features.reach

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
) -> DraftSession:
    """A session that goes on after the tokens ``given`` so far. ``featured``: its token source
    reads features of the target."""
    prefix = request.prompt + given
    last = NodeId(len(prefix) - 1)
    return DraftSession(
        session=session,
        request=request,
        policy=policy,
        stages=stages,
        prefix=prefix,
        before=given,
        tree=trees.plant(last, prefix[-1], len(prefix) - 1),
        unsent=(last,),
        root_parent=NodeId(len(prefix) - 2),
        next_node=NodeId(len(prefix)),
        features=Features(len(prefix)) if featured else None,
        counters=replace(counters, sessions=counters.sessions + 1),
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
        pending=len(session.sent) - len(session.judged),
        stages=session.stages,
        segments=session.segments,
        drafts=session.drafts,
        news=session.length - session.source_length,
        last_depth=session.last_depth,
        starving=starving,
        room=max(0, session.last_position - tree.nodes[tree.root].position),
    )


# --- verdicts -----------------------------------------------------------------------------------


def judge(session: DraftSession, verdict: Verdict, handle: object | None) -> DraftSession:
    """Note what the target said; ``handle``: to the features that came with it. Raises
    ``RemoteProtocolError`` for nodes never sent, and for features nobody wants."""
    named = {*verdict.ids, *verdict.featured}
    unsent = (n for n in named if n >= session.next_node or n in session.tree)
    prompt = range(session.prefilled, len(session.prefix))
    if any(n in prompt for n in named) or any(n not in session.sent for n in unsent):
        raise RemoteProtocolError(f"verdict on a node never sent in session {session.session}")
    features = session.features
    if features is not None:
        features = feature_books.note(features, verdict, handle, session.sent)
    elif verdict.featured or handle is not None:
        raise RemoteProtocolError(f"features nobody wants in session {session.session}")
    alive = {n: t for n, t in zip(verdict.ids, verdict.tokens, strict=True) if n in session.sent}
    return replace(
        session,
        judged={**session.judged, **alive},
        features=features,
        acknowledged=max(session.acknowledged, verdict.applied),
        clock=session.clock.judge(verdict.segment),
        counters=replace(session.counters, passes=session.counters.passes + (session.round > 0)),
    )


class Advance(Struct, frozen=True):
    """The committed path has grown by ``tokens``, of which the first ``hits`` were nodes of the
    tree. ``finish`` is the reason if that was the end."""

    session: DraftSession
    tokens: tuple[int, ...]
    hits: int
    prune: PruneIndices | None
    finish: str | None


def advance(session: DraftSession, now: float) -> Advance | None:
    """Accept what verdicts allow. None where they bring nothing new, or the policy waits."""
    if session.round and not session.policy.accepts(view(session)):
        return None
    walked = walk(session.tree, session.judged)
    if not walked.accepted and walked.bonus is None:
        return None
    path = tuple(session.tree.nodes[n].token for n in walked.accepted)
    tokens = path if walked.bonus is None else (*path, walked.bonus)
    tokens, finish = _until_end(session, tokens)
    hits = min(len(tokens), len(walked.accepted))
    session = _count(session, len(tokens), hits, now)
    moved = replace(session, committed=session.committed + tokens)
    if finish is not None:
        return Advance(moved, tokens, hits, None, finish)
    moved = _move(moved, walked.accepted, walked.bonus)
    return Advance(moved, tokens, hits, _prune(moved), None)


def _until_end(
    session: DraftSession, tokens: tuple[int, ...]
) -> tuple[tuple[int, ...], str | None]:
    """Cut at the first stop token or at the token limit."""
    left = session.request.max_new_tokens - len(session.given)
    for i, token in enumerate(tokens[:left]):
        if token in session.request.stop_tokens:
            return tokens[: i + 1], "stop"
    return tokens[:left], "length" if len(tokens) >= left else None


def _count(session: DraftSession, tokens: int, hits: int, now: float) -> DraftSession:
    """Book ``tokens`` new tokens, of which the first ``hits`` were nodes of the tree."""
    counters, clock, place = session.counters, session.clock, len(session.given)
    if session.round:
        missed = range(place + hits, place + tokens)
        counters = replace(counters, misses=(*counters.misses, *missed))
    else:
        clock = TurnClock()  # turns are counted from the first token on
        counters = replace(counters, firsts=(*counters.firsts, place))
        if counters.first_token is None:
            counters = replace(counters, first_token=now)
    return replace(session, counters=counters, clock=clock)


def _move(session: DraftSession, accepted: tuple[NodeId, ...], bonus: int | None) -> DraftSession:
    """The tip moves along ``accepted``, and on a miss to a new root that carries ``bonus``."""
    version = Version(session.version + 1)
    tip = accepted[-1] if accepted else session.tree.root
    if bonus is None:
        parent = session.tree.nodes[tip].parent
        tree, news = trees.reroot(session.tree, tip), accepted
        fresh = session
    else:
        parent, root = tip, session.next_node
        position = session.tree.nodes[tip].position + 1
        tree, news = trees.plant(root, bonus, position), (*accepted, root)
        fresh = replace(
            session,
            next_node=NodeId(root + 1),
            round=session.round + 1,
            clock=session.clock.flush(),
            segments=0,
            drafts=0,
            last_depth=0,
        )
    features = session.features
    if features is not None:
        line = (session.tree.root, *accepted)
        features = feature_books.move(
            features, line if bonus is not None else line[:-1], tree.nodes
        )
    # What every stage has applied need not be announced again: the nodes announced so far have
    # all passed every stage, for their verdicts led here, and are in its cache as committed.
    known = tuple((n, v) for n, v in session.announced if v > session.acknowledged)
    return replace(
        fresh,
        tree=tree,
        root_parent=parent,
        version=version,
        unsent=tuple([n for n in session.unsent if n in tree]) if bonus is None else (tree.root,),
        sent=session.sent.intersection(tree.nodes),
        judged={n: t for n, t in session.judged.items() if n in tree},
        features=features,
        announced=(*known, *((n, version) for n in news)),
    )


def _prune(session: DraftSession) -> PruneIndices:
    root = session.tree.root
    return PruneIndices(
        session=session.session,
        version=session.version,
        horizon=session.next_node,
        accepted=tuple(n for n, _ in session.announced),
        keep=tuple([n for n in session.tree.nodes if n != root]),
    )


# --- drafting -----------------------------------------------------------------------------------


def feed(session: DraftSession) -> tuple[DraftSession, Feed] | None:
    """The features the token source can be given; None where there are no new ones."""
    if session.features is None:
        return None
    fed = feature_books.feed(session.features, session.session)
    return None if fed is None else (replace(session, features=fed[0]), fed[1])


def ask(session: DraftSession, *, starving: bool) -> tuple[DraftSession, Expand] | None:
    """What the token source is to do next; None while it works or where there is nothing."""
    if session.asked is not None or not session.policy.drafts:
        return None
    if session.round:
        growth = session.policy.grow(view(session, starving=starving))
        if growth is None or session.barren == (growth, session.version, session.next_node):
            return None
    elif session.source_length >= session.reach:
        return None
    else:
        growth = None  # the source reads the prompt while the stages do, or right behind them
    job = _expand(session, growth)
    now = session.clock.ask()
    asked = Asked(job, growth, session.version, session.round, now, session.reach)
    depth = growth.shape.depth if growth else 0
    return (
        replace(session, asked=asked, source_length=session.reach, last_depth=depth),
        job,
    )


def _expand(session: DraftSession, growth: Growth | None) -> Expand:
    everything = session.prefix + session.committed
    job = Expand(
        session=session.session,
        version=session.version,
        base=session.source_length,
        committed=everything[session.source_length : session.reach],
        depth=0,
        width=0,
        count=0,
    )
    if growth is None:
        return job
    shape = growth.shape
    start = trees.stem(session.tree, growth.frontier)
    parents, tokens, scores = start.known
    return replace(
        job,
        depth=shape.depth,
        width=shape.width,
        count=shape.count,
        beam=shape.beam,
        fixed_width=shape.fixed_width,
        widths=shape.widths,
        parents=parents,
        tokens=tokens,
        scores=scores,
        frontier=start.frontier,
    )


def stop_asking(session: DraftSession) -> tuple[DraftSession, Expand] | None:
    """After a miss what the source grows is dead before it is there; None where it is not so."""
    asked = session.asked
    missed = asked is not None and asked.growth is not None and asked.round != session.round
    if asked is None or not missed or asked.abandoned:
        return None
    return replace(session, asked=replace(asked, abandoned=True)), asked.job


def expanded(session: DraftSession, answer: Expanded, seconds: float) -> DraftSession:
    """Merge a freshly drafted tree. The tip may have moved on since it was asked for."""
    asked = session.asked
    if asked is None or answer.base != asked.length:
        raise LocalProtocolError(f"nothing was asked of the source for {session.session}")
    session = replace(session, asked=None)
    counters = replace(
        session.counters,
        draft_passes=session.counters.draft_passes + 1,
        draft_seconds=session.counters.draft_seconds + seconds,
    )
    if asked.growth is None:
        return replace(session, counters=counters)
    tree, new = trees.merge(
        session.tree,
        (answer.parents, answer.tokens, answer.scores),
        session.next_node,
        walked=session.committed[asked.length - len(session.prefix) :],
        at_most=asked.growth.adopt,
        max_position=session.last_position,
    )
    return replace(
        session,
        tree=tree,
        unsent=session.unsent + new,
        next_node=NodeId(session.next_node + len(new)),
        barren=None if new else (asked.growth, asked.version, session.next_node),
        # A tree that was asked for in an earlier round is welcome, but not this round's own.
        drafts=session.drafts + (asked.round == session.round),
        clock=session.clock if asked.abandoned else session.clock.draft(asked.turn),
        counters=replace(counters, drafted=counters.drafted + len(new)),
    )


# --- sending ------------------------------------------------------------------------------------


def next_segment(
    session: DraftSession, *, prefill_rows: int, starving: bool
) -> tuple[DraftSession, Segment] | None:
    """The next piece of the prompt, or what the policy wants to send."""
    if session.prefilled < len(session.prefix):
        return _prefill(session, prefill_rows)
    if not session.round:
        return None
    ids = session.policy.cut(view(session, starving=starving))
    if not ids:
        return None
    chosen = frozenset(ids)
    if not connected(session.tree, ids, session.sent) or session.sent & chosen:
        raise LocalProtocolError(f"policy cut nodes that cannot be sent: {ids}")
    nodes = session.tree.nodes
    message = _segment(
        session,
        ids,
        tuple(session.root_parent if n == session.tree.root else nodes[n].parent for n in ids),
        tuple(nodes[n].token for n in ids),
    )
    counters = session.counters
    if not session.segments:
        counters = replace(counters, rounds=counters.rounds + 1)
    session = replace(
        session,
        unsent=tuple([n for n in session.unsent if n not in chosen]),
        sent=session.sent | chosen,
        segments=session.segments + 1,
        next_segment=SegmentId(session.next_segment + 1),
        clock=session.clock.send(
            message.segment, session.stages, drafts=ids != (session.tree.root,)
        ),
        counters=counters,
    )
    return session, message


def _prefill(session: DraftSession, rows: int) -> tuple[DraftSession, Segment]:
    start, root = session.prefilled, session.tree.root
    end = min(start + rows, len(session.prefix))
    ids = tuple(NodeId(i) for i in range(start, end))
    parents = tuple(NodeId(i - 1) if i else NO_PARENT for i in ids)
    message = _segment(session, ids, parents, session.prefix[start:end])
    return (
        replace(
            session,
            prefilled=end,
            unsent=() if root in ids else session.unsent,
            sent=session.sent.union({root}.intersection(ids)),
            next_segment=SegmentId(session.next_segment + 1),
        ),
        message,
    )


def _segment(
    session: DraftSession,
    ids: tuple[NodeId, ...],
    parents: tuple[NodeId, ...],
    tokens: tuple[int, ...],
) -> Segment:
    return Segment(
        session=session.session,
        segment=session.next_segment,
        applied=session.version,
        ids=ids,
        parents=parents,
        tokens=tokens,
    )
