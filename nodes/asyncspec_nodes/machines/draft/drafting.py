"""What the token source of a session is asked, given and told, and what it answers."""

from __future__ import annotations

from msgspec.structs import replace

from asyncspec import tree as trees
from asyncspec.jobs import Feed
from asyncspec.policy import Growth
from asyncspec.policy.base import Loop
from asyncspec.source.batch import READ
from asyncspec_nodes.machines.draft import features as feature_books
from asyncspec_nodes.machines.draft.session import Asked, DraftSession, view
from asyncspec_protocol.errors import LocalProtocolError
from asyncspec_protocol.ids import NodeId
from asyncspec_protocol.limits import MOST_CANDIDATES, MOST_NODES
from asyncspec_protocol.messages import Expand, Expanded


def feed(session: DraftSession) -> tuple[DraftSession, Feed] | None:
    """The features the token source can be given; None where there are no new ones."""
    if session.features is None:
        return None
    fed = feature_books.feed(session.features, session.session)
    return None if fed is None else (replace(session, features=fed[0]), fed[1])


def ask(
    session: DraftSession, *, guessing: bool, starving: bool, loop: Loop
) -> tuple[DraftSession, Expand] | None:
    """What the token source is to do next; None while it works or where there is nothing.
    ``guessing``: its tree may grow."""
    if session.asked is not None or not session.policy.drafts:
        return None
    if guessing and session.reach == session.length:
        growth = session.policy.grow(view(session, starving=starving, loop=loop))
        if growth is None or session.barren == (growth, session.version, session.next_node):
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
    shape, most = growth.shape, MOST_NODES
    start = trees.stem(session.tree, growth.frontier)
    parents, tokens, scores = start.known
    expanded = max(1, min(shape.beam or shape.width, most), len(start.frontier))
    children = max(1, min(most, MOST_CANDIDATES // expanded))
    widest = min(max(1, shape.width, *shape.widths), children)
    levels = min(most, MOST_CANDIDATES // (expanded * widest))
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
    clock, drafting = session.clock, session.drafting
    if not asked.abandoned:
        share = seconds / turn_seconds if turn_seconds else 1.0
        clock = clock.draft(asked.turn, share)
        # Below a new tip; below the prompt's last token it has read the prompt besides.
        if asked.job.committed and asked.length > len(session.prefix):
            drafting = share
    tree, new = trees.merge(
        session.tree,
        (answer.parents, answer.tokens, answer.scores),
        session.next_node,
        walked=session.committed[asked.length - len(session.prefix) :],
        at_most=min(asked.growth.adopt, MOST_NODES, session.most_live - len(session.tree) + 1),
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
        clock=clock,
        drafting=drafting,
        counters=replace(counters, drafted=counters.drafted + len(new)),
    )
