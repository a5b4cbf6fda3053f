"""How the token source is spoken to: a job of this node's device, or a message to its own node.

A source of this device is asked only when it is free, and then for all sessions that want something
in one batch; a node of its own makes batches of what it is asked for itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core import tree as trees
from asyncspec.core.accept import TargetOutput, walk
from asyncspec.core.jobs import Feed, Release
from asyncspec.core.machine import Abandon, Compute, Effect, Send
from asyncspec.policy.base import Growth
from asyncspec.source.batch import READ, admitted, batched
from asyncspec_nodes.roles.draft import session as feature_books
from asyncspec_nodes.roles.draft.session import Asked, DraftSession, view
from asyncspec_nodes.roles.draft.state import DraftState, Effects, guessing, put, starving
from asyncspec_protocol.errors import LocalProtocolError, RemoteProtocolError
from asyncspec_protocol.ids import NodeId, SessionId, Version
from asyncspec_protocol.limits import MAX_CANDIDATES, MAX_NODES
from asyncspec_protocol.messages import Expand, Expanded, PruneIndices, Verdict, Withdraw


def dispatch_request(state: DraftState) -> tuple[DraftState, Effects]:
    """The source is to grow what the sessions want of it, as far as it can be asked now."""
    if state.drafting:
        return state, ()
    source, asking = state.config.source, dict[SessionId, DraftSession]()
    wanted = _wanted(state, asking)
    jobs = admitted(wanted) if source is None else tuple(wanted)
    if not jobs:
        return state, ()
    state = replace(state, batches=state.batches + 1, drafting=source is None)
    for job in jobs:
        state = put(state, replace(asking[job.session], batch=state.batches))
    if source is not None:
        return state, tuple(Send(source, job) for job in jobs)
    return state, (Compute(batched(jobs)),)


def _wanted(state: DraftState, asking: dict[SessionId, DraftSession]) -> Iterator[Expand]:
    """What the sessions want, the longest waiting first; ``asking`` takes each of them as it is
    once it has asked."""
    for session in sorted(state.sessions.values(), key=_waiting):
        asked = ask(
            session,
            guessing=guessing(state, session),
            starving=starving(state),
        )
        if asked is not None:
            asking[session.session] = asked[0]
            yield asked[1]


def _waiting(session: DraftSession) -> int:
    return session.batch


def stop(state: DraftState, job: Expand) -> Effect:
    """What it grows is of no use any more."""
    source = state.config.source
    return Abandon(job) if source is None else Send(source, Withdraw(job.session))


def release(state: DraftState, session: DraftSession) -> Effects:
    """A session is over. A node of its own is told by the ``Close`` that all nodes get."""
    if state.config.source is not None or not session.policy.uses_draft:
        return ()
    forget = Compute(Release(session.session))
    if session.asked is None or session.asked.abandoned:
        return (forget,)
    return stop(state, session.asked.job), forget


# --- What the token source of a session is asked, given and told, and what it answers.


def feed(session: DraftSession) -> tuple[DraftSession, Feed] | None:
    """The features the token source can be given; None where there are no new ones."""
    if session.features is None:
        return None
    fed = feature_books.feed(session.features, session.session)
    return None if fed is None else (replace(session, features=fed[0]), fed[1])


def ask(
    session: DraftSession, *, guessing: bool, starving: bool
) -> tuple[DraftSession, Expand] | None:
    """What the token source is to do next; None while it works or where there is nothing.
    ``guessing``: its tree may grow."""
    if session.asked is not None or not session.policy.uses_draft:
        return None
    if guessing and session.reach == session.length:
        growth = session.policy.grow(view(session, starving=starving))
        if growth is None or session.no_growth == (growth, session.version, session.next_node):
            return None
    elif session.source_length >= session.reach:
        return None
    else:
        growth = None  # the source reads the prompt while the stages do, or right behind them
    length = min(session.reach, session.source_length + READ)
    if length < session.reach:
        growth = None  # it has to read first, and others have their turn before it has read all
    job = _expand(session, growth, length)
    now = session.clock.ask()
    asked = Asked(job, growth, session.version, session.round, now, length)
    depth = growth.shape.depth if growth else 0
    return replace(session, asked=asked, source_length=length, last_depth=depth), job


def _expand(session: DraftSession, growth: Growth | None, length: int) -> Expand:
    job = Expand(
        session=session.session,
        version=session.version,
        base=session.source_length,
        committed=session.path(session.source_length, length),
        depth=0,
        width=0,
        count=0,
    )
    if growth is None:
        return job
    # A user may name a policy with any parameters; what a message cannot say is not asked for.
    shape, most = growth.shape, MAX_NODES
    start = trees.paths_to(session.tree, growth.frontier)
    parents, tokens, scores = start.known
    expanded = max(1, min(shape.beam or shape.width, most), len(start.frontier))
    children = max(1, min(most, MAX_CANDIDATES // expanded))
    widest = min(max(1, shape.width, *shape.widths), children)
    levels = min(most, MAX_CANDIDATES // (expanded * widest))
    return replace(
        job,
        depth=min(shape.depth, levels),
        width=min(shape.width, children),
        count=min(shape.count, most),
        beam=min(shape.beam, most),
        fixed_width=shape.fixed_width,
        widths=tuple([min(width, children) for width in shape.widths[:levels]]),
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


def expanded(
    session: DraftSession, answer: Expanded, seconds: float, turn_seconds: float
) -> DraftSession:
    """Merge a freshly drafted tree, which took so many ``seconds``, where a turn of the pipeline
    takes ``turn_seconds`` (0: not known). The tip may have moved on since it was asked for."""
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
    clock = session.clock
    if not asked.abandoned:
        share = seconds / turn_seconds if turn_seconds else 1.0
        clock = clock.draft(asked.turn, share)
    tree, new = trees.merge(
        session.tree,
        (answer.parents, answer.tokens, answer.scores),
        session.next_node,
        walked=session.committed[asked.length - len(session.prefix) :],
        at_most=min(asked.growth.adopt, MAX_NODES, session.max_tree_nodes - len(session.tree) + 1),
        max_position=session.last_position,
    )
    return replace(
        session,
        tree=tree,
        unsent=session.unsent + new,
        next_node=NodeId(session.next_node + len(new)),
        no_growth=None if new else (asked.growth, asked.version, session.next_node),
        # A tree that was asked for in an earlier round is welcome, but not this round's own.
        drafts=session.drafts + (asked.round == session.round),
        clock=clock,
        counters=replace(counters, drafted=counters.drafted + len(new)),
    )


# --- What the target says of a session's tree, and how its tip moves along.


def judge(session: DraftSession, verdict: Verdict, handle: object | None) -> DraftSession:
    """Note what the target said; ``handle``: to the features that came with it. Raises
    ``RemoteProtocolError`` for nodes never sent, and for features nobody wants."""
    named = {*verdict.ids, *verdict.feature_ids}
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
    elif verdict.feature_ids or handle is not None:
        raise RemoteProtocolError(f"features nobody wants in session {session.session}")
    alive = {n: o for n, o in _target_outputs(session, verdict) if n in session.sent}
    return replace(
        session,
        verified={**session.verified, **alive},
        features=features,
        acknowledged=max(session.acknowledged, verdict.applied),
        clock=session.clock.judge(verdict.segment, session.stages, verdict.pass_number),
        counters=replace(session.counters, passes=session.counters.passes + session.answering),
    )


def _target_outputs(
    session: DraftSession, verdict: Verdict
) -> Iterator[tuple[NodeId, TargetOutput]]:
    """What a verdict says of each node, in the detail the policy asks for."""
    tops = len(verdict.top_tokens) // max(1, len(verdict.ids))
    if bool(tops) != bool(session.tops and verdict.ids):
        raise RemoteProtocolError(f"{tops} likeliest tokens a node in session {session.session}")
    if bool(verdict.token_log_probs) != bool(session.request.log_probs and verdict.ids):
        raise RemoteProtocolError(f"log-probabilities or none in session {session.session}")
    for i, (node, token) in enumerate(zip(verdict.ids, verdict.tokens, strict=True)):
        part = slice(i * tops, (i + 1) * tops)
        log_prob = verdict.token_log_probs[i] if verdict.token_log_probs else None
        yield (
            node,
            TargetOutput(
                token, verdict.top_tokens[part], verdict.top_token_log_probs[part], log_prob
            ),
        )


class Advance(Struct, frozen=True):
    """The committed path has grown by ``tokens``, of which the first ``hits`` were nodes of the
    tree. ``finish`` is the reason if that was the end."""

    session: DraftSession
    tokens: tuple[int, ...]
    hits: int
    prune: PruneIndices | None
    finish: str | None
    # What was said in the place of each token, where the request asks for it.
    outputs: tuple[TargetOutput, ...] = ()


def advance(session: DraftSession, now: float) -> Advance | None:
    """Accept what verdicts allow. None where they bring nothing new, or the policy waits."""
    if session.answering and not session.policy.accepts_verdicts(view(session)):
        return None
    walked = walk(session.tree, session.verified, session.policy.choose)
    if not walked.accepted and walked.bonus is None:
        return None
    path = tuple(session.tree.nodes[n].token for n in walked.accepted)
    tokens = path if walked.bonus is None else (*path, walked.bonus)
    tokens, finish = _until_end(session, tokens)
    hits = min(len(tokens), len(walked.accepted))
    outputs: tuple[TargetOutput, ...] = ()
    if session.request.log_probs:
        line = (session.tree.root, *walked.accepted)
        outputs = tuple(session.verified[node] for node in line[: len(tokens)])
    session = _count(session, len(tokens), hits, now)
    moved = replace(session, committed=session.committed + tokens)
    if finish is not None:
        return Advance(moved, tokens, hits, None, finish, outputs)
    moved = _move(moved, walked.accepted, walked.bonus)
    return Advance(moved, tokens, hits, _prune(moved), None, outputs)


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
        tree, news = trees.new_tree(root, bonus, position), (*accepted, root)
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
        initial_depth=tree.bottom - tree.nodes[tree.root].position,
        root_parent=parent,
        version=version,
        unsent=tuple([n for n in session.unsent if n in tree]) if bonus is None else (tree.root,),
        sent=session.sent.intersection(tree.nodes),
        verified={n: t for n, t in session.verified.items() if n in tree},
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
