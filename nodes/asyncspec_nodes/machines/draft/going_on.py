"""After every input every session goes as far as it can."""

from __future__ import annotations

from msgspec.structs import asdict, replace

from asyncspec.actor.machine import Compute, Effect, Emit, Send
from asyncspec_nodes.machines.draft import (
    admission,
    asking,
    breakers,
    dispatch,
    drafting,
    sharing,
    verdicts,
)
from asyncspec_nodes.machines.draft.ends import end, give_up, unserved
from asyncspec_nodes.machines.draft.measuring import advanced, tell
from asyncspec_nodes.machines.draft.session import DraftSession, open_session
from asyncspec_nodes.machines.draft.state import (
    FIRST,
    DraftState,
    Effects,
    Job,
    put,
    reachable,
)
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import Open


def go_on(state: DraftState, now: float) -> tuple[DraftState, Effects]:
    """Open what can be opened, accept what can be accepted, ask and send what can be.

    Nothing is opened, asked or sent between two verdicts of one pass: sessions that shared a pass
    go on together, so that they share the next one too.
    """
    effects: list[Effect] = []
    for session in state.sessions.values():
        state, accepted = _advance(state, session, now)
        effects.extend(accepted)
    if spare := sharing.spare(state):
        state, given_up = give_up(state, spare)
        effects.extend(given_up)
    if not state.expected:
        state, opened = _open_all(state, now)
        effects.extend(opened)
        state, told = tell(state)
        effects.extend(told)
        state, sent = dispatch.send(state, now)
        effects.extend(sent)
    for session in state.sessions.values():
        if fed := drafting.feed(session):
            session = fed[0]
            state = put(state, session)
            effects.append(Compute(fed[1]))
        if stopped := drafting.stop_asking(session):
            state = put(state, stopped[0])
            effects.append(asking.stop(state, stopped[1]))
    if not state.expected:
        state, asked = asking.ask(state)
        effects.extend(asked)
    return state, tuple(effects)


def _open_all(state: DraftState, now: float) -> tuple[DraftState, Effects]:
    """Sessions for the requests that wait, in their order, as far as there is room. Only who waits
    for a prompt that another session is reading anyway lets others pass."""
    effects: Effects = ()
    most = state.config.max_sessions
    while state.up and len(state.sessions) < most and not breakers.on_trial(state):
        state, job = _next(state)
        if job is None:
            break
        left = tuple(other for other in state.backlog if other is not job)
        if why := admission.too_large(state, job.request):
            state = replace(state, backlog=left)
            effects = (*effects, unserved(job, "error", why, now))
        elif admission.fits(state, job.request):
            state, opened = _open(replace(state, backlog=left), job, now)
            effects += opened
        elif free := admission.prompts_in_the_way(state, job.request):
            # A request that waits is worth more than one that may come.
            state, given_up = give_up(state, free[:1])
            effects += given_up
        else:
            break
    return state, effects


def _next(state: DraftState) -> tuple[DraftState, Job | None]:
    """The first request that waits for no other one's prompt. Prompts are long: what one waits for
    is noted, not found out at every input anew."""
    for place, job in enumerate(state.backlog):
        if sharing.waits(state, job):
            continue
        behind = sharing.being_read(state, sharing.wanted(state, job))
        if behind is None:
            return state, job
        backlog = list(state.backlog)
        backlog[place] = replace(job, behind=behind)
        state = replace(state, backlog=tuple(backlog))
    return state, None


def _open(state: DraftState, job: Job, now: float) -> tuple[DraftState, Effects]:
    config, request, sampling = state.config, job.request, job.request.sampling
    policy = config.policies[request.policy]
    features = config.features if policy.drafts else ()
    start = sharing.best_start(state, sharing.wanted(state, job))
    session = open_session(
        state.next_session,
        request,
        policy,
        config.stages,
        job.given,
        job.counters.opened_at(now),
        featured=bool(features),
        like=start.like,
        shared=start.shared,
        features=start.features,
    )
    message = Open(
        session=session.session,
        prompt_length=len(session.prefix),
        capacity=len(request.prompt) + request.max_new_tokens,
        tree=session.most_live,
        given=len(job.given),
        features=features,
        tops=session.tops,
        log_probs=request.log_probs,
        like=start.like,
        shared=start.shared,
        coalesce=policy.coalesce,
        **asdict(sampling),
    )
    state = replace(state, next_session=SessionId(state.next_session + 1))
    return put(state, session), (Send(FIRST, message),)


def _advance(state: DraftState, session: DraftSession, now: float) -> tuple[DraftState, Effects]:
    moved = verdicts.advance(session, now)
    if moved is None:
        return state, ()
    request = session.request.request
    emit = Emit(request, moved.tokens, moved.hits, session.session, moved.opinions)
    effects: Effects = (emit,)
    if moved.finish is not None:
        state, ended = end(state, moved.session, moved.finish, now)
        return state, (*effects, *ended)
    assert moved.prune is not None
    prunes = tuple(Send(rank, moved.prune) for rank in reachable(state))
    state = advanced(state, session, moved)
    return put(state, moved.session), (*effects, *prunes)
