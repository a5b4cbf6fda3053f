"""Sessions open and close, peers come and go."""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from asyncspec.core.jobs import Admit, Release, Trim
from asyncspec.core.kept_states import kept_state
from asyncspec.core.kv_slots import SlotTable, whole_blocks
from asyncspec.core.liveness import Liveness
from asyncspec.core.machine import Compute, Effect, Effects, LinkDown, Send, SendClosed
from asyncspec.core.sampling import Sampling
from asyncspec_nodes.roles.verify import stored_prefixes
from asyncspec_nodes.roles.verify.config import VerifyConfig
from asyncspec_nodes.roles.verify.flow_control import grant, release_dead, report_costs
from asyncspec_nodes.roles.verify.session import (
    LinkCredit,
    SlotShare,
    StageSession,
    VerifyState,
    fault,
    max_rows,
    slots_of,
)
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.ids import NodeId, Rank, SessionId, is_draft, owner
from asyncspec_protocol.limits import MAX_SECONDS, PREFIX_UNIT
from asyncspec_protocol.messages import Close, Open, Ready, Restore

EARLIER_SHARE_SECONDS = 300.0
"""An ``Open`` that was sent before its draft node heard of a smaller share has come by then: a link
that is silent for some seconds is lost."""

SPARE_SESSIONS = 2**33
"""Ids at the end of a draft node's range that no session has. Ids only grow, so a node that used
all of them up would leave none to the next one of its number, which needs half as many."""

MAX_CLOSED_EARLY = 4096
"""Sessions that one draft node may close unopened: what a faulty one can make a stage remember."""


def check_id(session: SessionId, peer: Rank) -> None:
    """Raise ``RemoteProtocolError`` for one of the last ids of a draft node."""
    if owner(SessionId(session + SPARE_SESSIONS)) != owner(session):
        raise RemoteProtocolError(f"session {session} has one of the last ids", peer=peer)


def open_session(
    state: VerifyState, peer: Rank, message: Open, now: float
) -> tuple[VerifyState, Effects]:
    """Open a session, here and at the next stage. Raises ``RemoteProtocolError``."""
    if peer not in state.inbound:
        raise RemoteProtocolError("session opened by a peer that is not linked", peer=peer)
    config, name, draft = state.config, message.session, owner(message.session)
    check_id(name, peer)
    marks = state.marks(draft)
    early = name in marks.closed_early
    if name <= marks.opened and not early:
        return state, ()  # it was over before its Open came
    closed_early = marks.closed_early - {name} if early else marks.closed_early
    marks = replace(marks, opened=max(marks.opened, name), closed_early=closed_early)
    state = state.with_marks(draft, marks)
    if draft not in state.peers or not (config.last or config.next_rank in state.peers):
        # Without the draft node nothing would end it here. Without the next stage the draft node
        # is about to learn of the break, and opens another session afterwards.
        return state, ()
    if not early:
        cached = _cached_tokens(state, message)
        if cached is None:
            return state, ()  # lost with a peer, as the draft node is about to learn
        if error := _admission_error(state, message, cached, now):
            return state, (fault(peer, name, error),)
    sampling = Sampling.of(message)
    prompt = message.prompt_length - message.resumed_tokens
    if error := _opening_error(config, message, sampling.shareable(prompt, message.prompt_length)):
        raise RemoteProtocolError(error, peer=peer)
    onward: Effects = () if config.last else (Send(config.next_rank, message),)
    session = StageSession(
        message,
        Liveness(prompt_length=message.prompt_length),
        SlotTable(message.common_prefix, NodeId(message.common_prefix - 1)),
        tokens_travel=sampling.reads_path,
        max_rows=max_rows(message, config.row_bytes),
    )
    if early:
        return state, (*onward, report(session))
    admit = Admit(
        name,
        slots_of(message),
        sampling,
        prompt,
        features=message.features,
        top_logprobs=message.top_logprobs,
        log_probs=message.log_probs,
        parent_session=message.parent_session,
        common_prefix=message.common_prefix,
        prompt_logprobs=message.prompt_logprobs,
        kept_state=_kept_state(message) if config.keeps_states else 0,
    )
    state = stored_prefixes.store(state, name, message.stored_as, message.prompt_length)
    state, granted = grant(replace(state, sessions={**state.sessions, name: session}), (peer,))
    return state, (Compute(admit), *onward, *granted)


def _opening_error(config: VerifyConfig, message: Open, shareable: int) -> str:
    """Why a device could not compute a session; empty where it can. ``shareable``: the most tokens
    that its draws need not read."""
    depth, name = max(message.features, default=0), message.session
    if depth > config.layers:
        return f"features of depth {depth} of {config.layers} layers"
    if message.common_prefix and not (config.shares_prefixes or config.keeps_states):
        return f"session {name} shares tokens, which this target's layers cannot"
    if message.common_prefix > shareable:
        return f"session {name} shares tokens that its draws need"
    token = max((token for token, _ in message.constraint.logit_bias), default=0)
    if token >= config.vocab:
        return f"token {token} is biased, and the vocabulary has {config.vocab}"
    return ""


def _cached_tokens(state: VerifyState, message: Open) -> int | None:
    """Cached tokens of the parent, 0 if none are shared; None without the parent."""
    if not message.common_prefix:
        return 0
    parent = state.sessions.get(message.parent_session)
    if parent is None:
        return state.cached_prompts.get(message.parent_session)
    return parent.slots.committed


def _kept_state(message: Open) -> int:
    return kept_state(message.prompt_length, message.common_prefix)


def _states_of(state: VerifyState, name: SessionId) -> tuple[int, ...]:
    """The lengths after which the states of a session's prompt and answer are kept."""
    session = state.sessions.get(name)
    if session is None:
        return state.cached_states.get(name, ())
    read = session.slots.committed >= session.liveness.prompt_length
    return (_kept_state(session.opening),) if read else ()


def _admission_error(state: VerifyState, message: Open, cached: int, now: float) -> str:
    """Why a session does not fit: it shares more tokens than there are, or its draft node, which
    decides on admission, has no such memory here. Empty where it fits."""
    if message.common_prefix > cached:
        return (
            f"session {message.session} shares {message.common_prefix} tokens with session "
            f"{message.parent_session}, which has {cached}"
        )
    if (
        message.common_prefix
        and state.config.keeps_states
        and message.common_prefix not in _states_of(state, message.parent_session)
    ):
        return (
            f"session {message.session} begins after {message.common_prefix} tokens of session "
            f"{message.parent_session}, whose state there is not kept"
        )
    return _room_error(state, message.session, slots_of(message), now)


def _room_error(state: VerifyState, session: SessionId, slots: int, now: float) -> str:
    """Why its draft node has no room here for a session of so many slots; empty where it has."""
    draft, limit = owner(session), state.config.sessions
    kept = {**state.cached_prompts, **state.stored_prefixes.restoring}
    sessions = [one.max_slots for name, one in state.sessions.items() if owner(name) == draft]
    prompts = [length for name, length in kept.items() if owner(name) == draft]
    held = [*sessions, *prompts]
    if limit and len(held) >= limit:
        return f"more than {limit} sessions at a time: give all nodes the same [limits] sessions"
    share = state.shares.get(draft, SlotShare())
    if not share.slots:
        return ""
    room, needed = share.most(now), whole_blocks(slots)
    taken = sum(map(whole_blocks, held))
    if taken + needed <= room:
        return ""
    return (
        f"session {session} may take {needed} cache slots, and of {room} there are "
        f"{max(0, room - taken)} left"
    )


def restore(
    state: VerifyState, draft: Rank, message: Restore, now: float
) -> tuple[VerifyState, Effects]:
    """Read a prompt from disk. Raises ``RemoteProtocolError`` where there is no room for it, which
    the draft node has looked after."""
    name, keys = message.session, message.stored_as
    check_id(name, draft)
    used = (state.sessions, state.closing, state.cached_prompts, state.stored_prefixes.restoring)
    if any(name in sessions for sessions in used):
        raise RemoteProtocolError(f"session {name} is in use, and restored", peer=draft)
    if error := _room_error(state, name, len(keys) * PREFIX_UNIT, now):
        raise RemoteProtocolError(error, peer=draft)
    return stored_prefixes.begin_restore(state, name, keys)


def close_session(state: VerifyState, message: Close) -> tuple[VerifyState, Effects]:
    """Close a session; one that has not come yet never opens. Raises ``RemoteProtocolError`` where
    too many are closed unopened."""
    name, draft = message.session, owner(message.session)
    check_id(name, draft)
    # Nothing is here, not even a prompt; of one in ``closing`` the report, still to come, says so.
    empty: Effects = () if name in state.closing else (SendClosed(draft, name, 0, 0, 0, 0.0),)
    if name in state.cached_prompts:
        cached = {k: v for k, v in state.cached_prompts.items() if k != name}
        states = {k: v for k, v in state.cached_states.items() if k != name}
        state = replace(state, cached_prompts=cached, cached_states=states)
        return state, (Compute(Release(name)), *empty)
    if name in state.stored_prefixes.restoring:
        return stored_prefixes.cancel_restore(state, name)
    session = state.sessions.get(name)
    if session is None:
        marks = state.marks(draft)
        if name <= marks.opened:
            return state, empty
        early = marks.closed_early | {name}
        if len(early) > MAX_CLOSED_EARLY:
            raise RemoteProtocolError("too many sessions closed unopened", peer=draft)
        return state.with_marks(draft, replace(marks, closed_early=early)), ()
    state = replace(state, sessions={k: v for k, v in state.sessions.items() if k != name})
    length = max(session.liveness.prompt_length, message.kept_tokens)
    keep = message.keep and session.slots.committed >= length
    effects: Effects = (Compute(Trim(name, length) if keep else Release(name)),)
    if keep:
        state = replace(state, cached_prompts={**state.cached_prompts, name: length})
        if state.config.keeps_states:
            # The tip's state is that after the last token but one at most.
            tips = (length,) if length >= session.slots.committed - 1 else ()
            kept = (_kept_state(session.opening), *tips)
            state = replace(state, cached_states={**state.cached_states, name: kept})
        prompt_length = session.liveness.prompt_length
        state = stored_prefixes.store(state, name, message.stored_as, prompt_length)
    if state.running is not None and state.running.has(name):
        state = replace(state, closing={**state.closing, name: session})
    else:
        effects += (report(session, kept=keep),)
    state, released = release_dead(state)
    return state, (*released, *effects)


def raise_floor(state: VerifyState, draft: Rank, first: SessionId) -> tuple[VerifyState, Effects]:
    """End every session of a draft node below ``first``, as it could not close them itself."""
    check_id(first, draft)
    marks = state.marks(draft)
    marks = replace(
        marks,
        opened=max(marks.opened, SessionId(first - 1)),
        closed_early=frozenset(name for name in marks.closed_early if name >= first),
        floor=max(marks.floor, first),
    )
    held = (*state.sessions, *state.cached_prompts, *state.stored_prefixes.restoring)
    over = frozenset(name for name in held if name < first and owner(name) == draft)
    state, dropped = _drop(state.with_marks(draft, marks), over)
    return state, (*dropped, ready(state, draft))


def report(session: StageSession, *, kept: bool = False) -> SendClosed:
    """The statistics of a session. ``kept``: its prompt stays cached."""
    name = session.opening.session
    rows, dead = session.rows, session.dead_rows
    return SendClosed(
        owner(name), name, session.passes, rows, dead, session.compute_seconds, kept=kept
    )


def link_up(state: VerifyState, peer: Rank, now: float) -> tuple[VerifyState, Effects]:
    """A link is up: credit starts anew on it."""
    config = state.config
    state = replace(state, peers=state.peers | {peer})
    effects: list[Effect] = []
    if config.is_upstream(peer):
        state, granted = grant(state.with_credit(peer, LinkCredit()), (peer,))
        effects.extend(granted)
    if is_draft(peer):
        state = _with_shares(state, now)
        changed = state.drafts if config.slots else (peer,)  # all shares are smaller now
        effects.extend(ready(state, draft) for draft in changed)
        # Reported to all draft nodes once more: it is little, and this one has nothing yet.
        state, reports = report_costs(replace(state, cost=state.cost.unreported()))
        effects.extend(reports)
    elif peer == config.next_rank and not config.last:
        state = replace(state, allowed=0, sent=0)
        effects.extend(ready(state, draft) for draft in state.drafts)
    return state, tuple(effects)


def _with_shares(state: VerifyState, now: float) -> VerifyState:
    """The state with the shares that the draft nodes are about to be sent."""
    slots, previous = state.slot_share, state.shares
    if not slots:
        return state
    shares = {
        draft: previous.get(draft, SlotShare()).then(slots, now, EARLIER_SHARE_SECONDS)
        for draft in state.drafts
    }
    return replace(state, shares={**previous, **shares})


def ready(state: VerifyState, draft: Rank, silent: float = 0.0) -> Send:
    """Report this stage's link, its slots for a draft node, and which sessions are over.
    ``silent``: since the next stage was heard, where it is lost."""
    config, marks = state.config, state.marks(draft)
    up = config.last or config.next_rank in state.peers
    report = Ready(
        rank=config.rank,
        up=up,
        slots=state.slot_share,
        opened=marks.opened,
        floor=marks.floor,
        silent=silent,
        memory_kill=config.memory_kill,
        crash=config.crash,
        stores_prefixes=config.stores_prefixes,
    )
    if config.processor:
        layers = (config.first_layer, config.end_layer)
        report = replace(report, processor=config.processor, layers=layers)
    return Send(draft, report)


def link_down(state: VerifyState, event: LinkDown, now: float) -> tuple[VerifyState, Effects]:
    """A link is down: a draft node's sessions end with it, and all with a neighbour. The draft
    nodes have the committed paths, and open new ones when the pipeline is complete again."""
    peer = event.peer
    if peer not in state.peers:
        return state, ()
    config = state.config
    inbound = {rank: credit for rank, credit in state.inbound.items() if rank != peer}
    state = replace(state, peers=state.peers - {peer}, inbound=inbound)
    everything = state.sessions.keys() | state.closing.keys() | state.cached_prompts.keys()
    everything |= state.stored_prefixes.restoring.keys()
    every = config.is_neighbour(peer)
    over = frozenset(name for name in everything if every or owner(name) == peer)
    state, effects = _drop(state, over)
    if is_draft(peer) and peer in state.watermarks:
        # Their ``Open`` never comes now, and they are below the ``Floor`` when it is back.
        state = state.with_marks(peer, replace(state.marks(peer), closed_early=frozenset()))
    if is_draft(peer):
        state = _with_shares(state, now)
    next_lost = peer == config.next_rank and not config.last
    if next_lost or (is_draft(peer) and config.slots):
        silent = min(event.silent, MAX_SECONDS) if next_lost else 0.0
        effects = (*effects, *(ready(state, draft, silent) for draft in state.drafts))
    return state, effects


def _drop(state: VerifyState, over: Collection[SessionId]) -> tuple[VerifyState, Effects]:
    """End sessions with all that waits of them, and report what they have cost."""
    held = (*state.sessions, *state.cached_prompts, *state.stored_prefixes.restoring)
    releases = tuple(Compute(Release(name)) for name in held if name in over)
    sessions = {**state.closing, **state.sessions}.items()
    reports = tuple(report(session) for name, session in sessions if name in over)
    state = replace(
        state,
        sessions={k: v for k, v in state.sessions.items() if k not in over},
        closing={k: v for k, v in state.closing.items() if k not in over},
        cached_prompts={k: v for k, v in state.cached_prompts.items() if k not in over},
        cached_states={k: v for k, v in state.cached_states.items() if k not in over},
    )
    state, released = release_dead(stored_prefixes.end_restore(state, *over))
    return state, (*released, *releases, *reports)
