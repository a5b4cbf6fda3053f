"""What the first stage answers to whoever asks what it plans for, and how."""

from __future__ import annotations

from msgspec.structs import replace

from asyncspec.dipsd.brought import Account
from asyncspec_nodes.machines.verify.question import passes
from asyncspec_nodes.machines.verify.rota import Rota
from asyncspec_nodes.machines.verify.state import VerifyState
from asyncspec_protocol.messages import Consulted


def consulted(state: VerifyState, question: int) -> Consulted:
    """The answer to a question, as things are now."""
    rota = state.rota
    known = [session for session in sorted(rota.members) if rota.members[session].rounds]
    told = [rota.members[session] for session in known]
    place = {s: n for n, batch in enumerate(rota.batches, start=1) for s in batch}
    stages = passes(state, len(known)) or ()
    answer = Consulted(
        question=question,
        sessions=tuple(known),
        rounds=tuple([rates.rounds for rates in told]),
        lows=tuple([rates.alpha for rates in told]),
        means=tuple([max(rates.alpha, rates.mean) for rates in told]),
        highs=tuple([max(rates.alpha, rates.mean, rates.high) for rates in told]),
        token_seconds=tuple([rates.token_seconds for rates in told]),
        call_seconds=tuple([rates.call_seconds for rates in told]),
        link_seconds=tuple([rates.link_seconds for rates in told]),
        jitters=tuple([rates.jitter for rates in told]),
        link_jitters=tuple([rates.link_jitter for rates in told]),
        pass_seconds=tuple([fixed for fixed, _, _ in stages]),
        row_seconds=tuple([row for _, row, _ in stages]),
        pass_jitters=tuple([jitter for _, _, jitter in stages]),
        unknown=len(rota.members) - len(known),
        aside=sum(offence.aside for offence in rota.offences.values()),
        batches=tuple([place.get(session, 0) for session in known]),
        lengths=tuple([rota.lengths.get(session, 0) for session in known]),
        batch_rows=state.config.batch_rows,
    )
    return _in_use(answer, rota)


def _in_use(answer: Consulted, rota: Rota) -> Consulted:
    decision, comparison = rota.decision, rota.comparison
    if decision is None:
        return answer
    account = comparison.greedy if comparison.tried is None else comparison.plans
    return replace(
        answer,
        used=used(rota),
        version=rota.version,
        period=rota.period if rota.batches else 0.0,
        planned=decision.planned,
        greedy=decision.greedy,
        brought=account.rate * len(rota.forecast),
        measured=account.seconds / max(1, len(rota.forecast)),
        plan_share=_share(comparison.plans),
        plan_rounds=comparison.plans.rounds,
        greedy_share=_share(comparison.greedy),
        greedy_rounds=comparison.greedy.rounds,
    )


def used(rota: Rota) -> str:
    """What is in use, as ``Consulted`` says it."""
    if rota.decision is None:
        return ""
    if rota.batches:
        return "plan"
    if not rota.decision.groups:
        return "greedy"
    return "look" if rota.comparison.looking else "dropped"


def _share(account: Account) -> float:
    return account.share if account.rounds else 0.0
