"""What the target says of a session's tree, and how its tip moves along."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from asyncspec import tree as trees
from asyncspec.accept import Opinion, walk
from asyncspec_nodes.machines.draft import features as feature_books
from asyncspec_nodes.machines.draft.session import DraftSession, view
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.ids import NodeId, Version
from asyncspec_protocol.messages import PruneIndices, Verdict


def judge(session: DraftSession, verdict: Verdict, handle: object | None) -> DraftSession:
    """Note what the target said; ``handle``: to the features that came with it. Raises
    ``RemoteProtocolError`` for nodes never sent, and for features nobody wants."""
    named = {*verdict.ids, *verdict.featured}
    unsent = (n for n in named if n >= session.next_node or n in session.tree)
    prompt = range(session.prefilled, len(session.prefix))
    if any(n in prompt for n in named) or any(n not in session.sent for n in unsent):
        raise RemoteProtocolError(f"verdict on a node never sent in session {session.session}")
    if verdict.applied > session.version:
        # What is taken for known to every stage is never announced again.
        raise RemoteProtocolError(
            f"version {verdict.applied} of session {session.session} was never announced"
        )
    features = session.features
    if features is not None:
        features = feature_books.note(features, verdict, handle, session.sent)
    elif verdict.featured or handle is not None:
        raise RemoteProtocolError(f"features nobody wants in session {session.session}")
    alive = {n: opinion for n, opinion in _opinions(session, verdict) if n in session.sent}
    return replace(
        session,
        judged={**session.judged, **alive},
        features=features,
        acknowledged=max(session.acknowledged, verdict.applied),
        clock=session.clock.judge(verdict.segment, session.stages, verdict.turn),
        counters=replace(session.counters, passes=session.counters.passes + session.answering),
    )


def _opinions(session: DraftSession, verdict: Verdict) -> Iterator[tuple[NodeId, Opinion]]:
    """What a verdict says of each node, in the detail the policy asks for."""
    tops = len(verdict.likely) // max(1, len(verdict.ids))
    if bool(tops) != bool(session.tops and verdict.ids):
        raise RemoteProtocolError(f"{tops} likeliest tokens a node in session {session.session}")
    if bool(verdict.drawn) != bool(session.request.log_probs and verdict.ids):
        raise RemoteProtocolError(f"log-probabilities or none in session {session.session}")
    for i, (node, token) in enumerate(zip(verdict.ids, verdict.tokens, strict=True)):
        part = slice(i * tops, (i + 1) * tops)
        log_prob = verdict.drawn[i] if verdict.drawn else None
        yield node, Opinion(token, verdict.likely[part], verdict.log_probs[part], log_prob)


class Advance(Struct, frozen=True):
    """The committed path has grown by ``tokens``, of which the first ``hits`` were nodes of the
    tree. ``finish`` is the reason if that was the end."""

    session: DraftSession
    tokens: tuple[int, ...]
    hits: int
    prune: PruneIndices | None
    finish: str | None
    # What was said in the place of each token, where the request asks for it.
    opinions: tuple[Opinion, ...] = ()


def advance(session: DraftSession, now: float) -> Advance | None:
    """Accept what verdicts allow. None where they bring nothing new, or the policy waits."""
    if session.answering and not session.policy.accepts(view(session)):
        return None
    walked = walk(session.tree, session.judged, session.policy.choose)
    if not walked.accepted and walked.bonus is None:
        return None
    path = tuple(session.tree.nodes[n].token for n in walked.accepted)
    tokens = path if walked.bonus is None else (*path, walked.bonus)
    tokens, finish = _until_end(session, tokens)
    hits = min(len(tokens), len(walked.accepted))
    opinions: tuple[Opinion, ...] = ()
    if session.request.log_probs:
        line = (session.tree.root, *walked.accepted)
        opinions = tuple(session.judged[node] for node in line[: len(tokens)])
    session = _count(session, len(tokens), hits, now)
    moved = replace(session, committed=session.committed + tokens)
    if finish is not None:
        return Advance(moved, tokens, hits, None, finish, opinions)
    moved = _move(moved, walked.accepted, walked.bonus)
    return Advance(moved, tokens, hits, _prune(moved), None, opinions)


def _until_end(
    session: DraftSession, tokens: tuple[int, ...]
) -> tuple[tuple[int, ...], str | None]:
    """Cut at the first stop token or at the token limit."""
    left = session.request.max_new_tokens - session.new_tokens
    for i, token in enumerate(tokens[:left]):
        if token in session.request.stop_tokens:
            return tokens[: i + 1], "stop"
    return tokens[:left], "length" if len(tokens) >= left else None


def _count(session: DraftSession, tokens: int, hits: int, now: float) -> DraftSession:
    """Book ``tokens`` new tokens, of which the first ``hits`` were nodes of the tree."""
    counters, clock, place = session.counters, session.clock, session.new_tokens
    if not session.answering:
        clock = clock.begin()
        # A round that was begun before counts where it goes on.
        rounds = counters.rounds + (hits > 0 and session.segments > 0)
        counters = replace(counters, rounds=rounds, firsts=(*counters.firsts, place))
        if counters.first_token is None:
            counters = replace(counters, first_token=now)
        place, tokens, hits = place + 1, tokens - 1, max(0, hits - 1)
    missed = range(place + hits, place + tokens)
    counters = replace(counters, misses=(*counters.misses, *missed))
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
        begun=tree.bottom - tree.nodes[tree.root].position,
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
