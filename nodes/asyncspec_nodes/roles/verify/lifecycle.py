"""Sessions open and close; each one's account goes to its draft node."""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from asyncspec.core.jobs import Admit, Release, Trim
from asyncspec.core.kv_slots import SlotTable
from asyncspec.core.liveness import Liveness
from asyncspec.core.machine import Compute, Effect, Send, SendClosed
from asyncspec.core.sampling import Sampling
from asyncspec_nodes.roles.verify.flow_control import (
    abandon_dead,
    grant,
    put,
    tell_costs,
    thin_queue,
)
from asyncspec_nodes.roles.verify.session import StageSession
from asyncspec_nodes.roles.verify.state import UNKNOWN, Effects, Inflow, VerifyState, know
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.ids import NodeId, Rank, SessionId, is_draft, owner
from asyncspec_protocol.messages import Close, Fault, Open, Ready

# A bound on what a confused draft node can make a stage remember.
MAX_CLOSED_EARLY = 4096


def opened(state: VerifyState, peer: Rank, message: Open) -> tuple[VerifyState, Effects]:
    """A session begins here and is announced to the next stage. Raises ``RemoteProtocolError`` for
    one that cannot."""
    if peer not in state.inflows:
        raise RemoteProtocolError("session opened by who is not linked", peer=peer)
    config, session = state.config, message.session
    draft = owner(session)
    known = state.known.get(draft, UNKNOWN)
    early = session in known.closed_early
    if session <= known.opened and not early:
        return state, ()  # over before it came down the pipeline
    known = replace(
        known,
        opened=max(known.opened, session),
        closed_early=known.closed_early - {session} if early else known.closed_early,
    )
    state = know(state, draft, known)
    if draft not in state.peers or not (config.last or config.after in state.peers):
        # Its draft node is gone, and would never end it here; or the next stage will never hear of
        # it: that the link is down is on its way to the draft node. It opens another session when
        # the pipeline stands again.
        return state, ()
    if message.common_prefix and not early:
        held = _held(state, message)
        if held is None:
            return state, ()  # lost with a peer, as the draft node is about to learn
        if message.common_prefix > held:
            return state, _refused(peer, session, _shares_more(message, held))
    if not early and (wrong := _no_room(state, message)):
        return state, _refused(peer, session, wrong)
    onward: Effects = () if config.last else (Send(config.after, message),)
    if max(message.features, default=0) > config.layers:
        raise RemoteProtocolError(
            f"features of depth {max(message.features)} of {config.layers} layers", peer=peer
        )
    sampling = Sampling.of(message)
    if message.common_prefix and sampling.penalises:
        # Penalties count the tokens of a prompt, and those of a shared one never come here.
        raise RemoteProtocolError(
            f"session {session} shares a prompt and penalises tokens", peer=peer
        )
    new = StageSession(
        session=session,
        liveness=Liveness(prompt_length=message.prompt_length),
        features=message.features,
        tops=message.top_logprobs,
        log_probs=message.log_probs,
        coalesce=message.coalesce,
        tokens_travel=sampling.penalises,
        slots=SlotTable(message.common_prefix, NodeId(message.common_prefix - 1)),
        most_slots=message.capacity + message.max_tree_nodes if message.max_tree_nodes >= 0 else 0,
    )
    if early:
        return state, (*onward, report(new))
    asked = message.prompt_length - message.resumed_tokens
    admit = Admit(
        session,
        message.capacity + max(0, message.max_tree_nodes),
        sampling,
        asked,
        features=message.features,
        top_logprobs=message.top_logprobs,
        log_probs=message.log_probs,
        parent_session=message.parent_session,
        common_prefix=message.common_prefix,
    )
    state, granted = grant(replace(state, sessions={**state.sessions, session: new}), (peer,))
    return state, (Compute(admit), *onward, *granted)


def _held(state: VerifyState, message: Open) -> int | None:
    """How long the prompt is here that a session begins with; None where it is not here."""
    older = state.sessions.get(message.parent_session)
    return state.kept.get(message.parent_session) if older is None else older.slots.committed


def _shares_more(message: Open, held: int) -> str:
    """More is to be taken over than there is."""
    return (
        f"session {message.session} shares {message.common_prefix} tokens with session "
        f"{message.parent_session}, which has {held}"
    )


def _no_room(state: VerifyState, message: Open) -> str:
    """Why a session takes more memory than there is for those of its draft node, which admits no
    such session; empty where it does not."""
    slots, draft = state.config.slots, owner(message.session)
    needed = message.capacity + max(0, message.max_tree_nodes)
    taken = sum(one.most_slots for name, one in state.sessions.items() if owner(name) == draft)
    taken += sum(length for name, length in state.kept.items() if owner(name) == draft)
    if not slots or taken + needed <= slots:
        return ""
    return (
        f"session {message.session} may take {needed} cache slots, and of {slots} there are "
        f"{max(0, slots - taken)} left"
    )


def _refused(peer: Rank, session: SessionId, wrong: str) -> Effects:
    """A session does not begin here. A stage that has passed it on took it, so it is the draft node
    that is told why, and the stages' link stays. Raises ``RemoteProtocolError`` where it said it
    itself."""
    if is_draft(peer):
        raise RemoteProtocolError(wrong, peer=peer)
    return (Send(owner(session), Fault("protocol", wrong)),)


def closed(state: VerifyState, message: Close) -> tuple[VerifyState, Effects]:
    """A session is over; one that has not come yet never begins."""
    session_id = message.session
    session = state.sessions.get(session_id)
    draft = owner(session_id)
    # Its account, which is still to come, says it as well.
    free: Effects = () if session_id in state.closing else (_nothing_left(session_id),)
    if session_id in state.kept:
        left = {k: v for k, v in state.kept.items() if k != session_id}
        return replace(state, kept=left), (Compute(Release(session_id)), *free)
    if session is None:
        known = state.known.get(draft, UNKNOWN)
        if session_id > known.opened:
            early = known.closed_early | {session_id}
            if len(early) > MAX_CLOSED_EARLY:
                raise RemoteProtocolError("too many sessions closed unopened", peer=draft)
            return know(state, draft, replace(known, closed_early=early)), ()
        return state, free
    sessions = {k: v for k, v in state.sessions.items() if k != session_id}
    state = replace(state, sessions=sessions)
    length = session.liveness.prompt_length
    if message.keep and session.slots.committed >= length:
        state = replace(state, kept={**state.kept, session_id: length})
        release: Effects = (Compute(Trim(session_id, length)),)
    else:
        release = (Compute(Release(session_id)),)
    running = state.running
    if running is not None and running.of(session_id):
        state = replace(state, closing={**state.closing, session_id: session})
    else:
        release = (*release, report(session, kept=session_id in state.kept))
    state, abandoned = abandon_dead(state)
    state, granted = thin_queue(state)
    return state, (*abandoned, *release, *granted)


def raise_floor(state: VerifyState, draft: Rank, first: SessionId) -> tuple[VerifyState, Effects]:
    """Forget every session of a draft node below ``first``: they ended while it could not say
    so."""
    held = (*state.sessions, *state.kept)
    over = tuple(s for s in held if s < first and owner(s) == draft)
    told = tuple(report(state.sessions[s]) for s in over if s in state.sessions)
    known = state.known.get(draft, UNKNOWN)
    known = replace(
        known,
        opened=max(known.opened, SessionId(first - 1)),
        closed_early=frozenset(s for s in known.closed_early if s >= first),
        floor=max(known.floor, first),
    )
    state = replace(
        know(state, draft, known),
        sessions={k: v for k, v in state.sessions.items() if k not in over},
        kept={k: v for k, v in state.kept.items() if k not in over},
    )
    state, abandoned = abandon_dead(state)
    state, granted = thin_queue(state)
    released = tuple(Compute(Release(session)) for session in over)
    return state, (*abandoned, *released, *told, *granted)


def report(session: StageSession, *, kept: bool = False) -> SendClosed:
    """The account of a session. ``kept``: its prompt stays."""
    return SendClosed(
        to=owner(session.session),
        session=session.session,
        passes=session.passes,
        rows=session.rows,
        dead_rows=session.dead_rows,
        compute_seconds=session.compute_seconds,
        kept=kept,
    )


def _nothing_left(session: SessionId) -> SendClosed:
    """Nothing is here of a session whose account was given before, not even its prompt."""
    return SendClosed(owner(session), session, 0, 0, 0, 0.0)


# --- Neighbours and draft nodes come and go.


def joined(state: VerifyState, peer: Rank) -> tuple[VerifyState, Effects]:
    """A link is up: credit starts anew on it."""
    config = state.config
    state = replace(state, peers=state.peers | {peer})
    effects: list[Effect] = []
    if config.fed_by(peer):
        state, granted = grant(put(state, peer, Inflow()), (peer,))
        effects.extend(granted)
    if is_draft(peer):
        news = state.drafts if config.slots else (peer,)  # all shares are smaller now
        effects.extend(ready(state, draft) for draft in news)
        # Told once more, to all of them: it is little, and this one knows nothing yet.
        state, told = tell_costs(replace(state, cost=state.cost.unreported()))
        effects.extend(told)
    elif peer == config.after and not config.last:
        state = replace(state, allowed=0, sent=0)
        effects.extend(ready(state, draft) for draft in state.drafts)
    return state, tuple(effects)


def ready(state: VerifyState, draft: Rank) -> Send:
    """What a draft node is told of this stage, and of its own sessions here."""
    up = state.config.last or state.config.after in state.peers
    known = state.known.get(draft, UNKNOWN)
    message = Ready(state.config.rank, up, _share(state), known.opened, known.floor)
    return Send(draft, message)


def _share(state: VerifyState) -> int:
    """Cache slots that a draft node may count on: it knows of no other one's sessions."""
    slots = state.config.slots
    return max(1, slots // len(state.drafts)) if slots else 0


def lost(state: VerifyState, peer: Rank) -> tuple[VerifyState, Effects]:
    """Without its draft node no session can go on, and without a neighbour none at all; the draft
    nodes, which have the committed paths, open new ones when the pipeline stands again."""
    if peer not in state.peers:
        return state, ()
    config = state.config
    inflows = {rank: inflow for rank, inflow in state.inflows.items() if rank != peer}
    state = replace(state, peers=state.peers - {peer}, inflows=inflows)
    everything = state.sessions.keys() | state.closing.keys() | state.kept.keys()
    over = frozenset(s for s in everything if not is_draft(peer) or owner(s) == peer)
    state, dropped = _drop(state, over)
    if is_draft(peer) and peer in state.known:
        # What it has closed will not be opened here while it is away, and is over when it is back
        # (``Floor``).
        state = know(state, peer, replace(state.known[peer], closed_early=frozenset()))
    told: Effects = ()
    if (peer == config.after and not config.last) or (is_draft(peer) and config.slots):
        told = tuple(ready(state, draft) for draft in state.drafts)
    return state, (*dropped, *told)


def _drop(state: VerifyState, over: Collection[SessionId]) -> tuple[VerifyState, Effects]:
    """Sessions are over, and all that waits of them; what they have cost is told to whoever is
    there to hear it."""
    held = (*state.sessions, *state.kept)
    released = tuple(Compute(Release(session)) for session in held if session in over)
    open_ones = {**state.closing, **state.sessions}
    told = tuple(report(session) for name, session in open_ones.items() if name in over)
    state = replace(
        state,
        sessions={k: v for k, v in state.sessions.items() if k not in over},
        closing={k: v for k, v in state.closing.items() if k not in over},
        kept={k: v for k, v in state.kept.items() if k not in over},
        queue=tuple([w for w in state.queue if w.session not in over]),
        parked=tuple([w for w in state.parked if w.session not in over]),
    )
    state, abandoned = abandon_dead(state)
    state, granted = grant(state)
    return state, (*abandoned, *released, *told, *granted)
