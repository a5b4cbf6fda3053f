"""Draft nodes are told what passes and the line take."""

from __future__ import annotations

from msgspec.structs import replace

from asyncspec.actor.machine import Send
from asyncspec.pass_cost import NEWS
from asyncspec_nodes.machines.verify.state import Effects, VerifyState
from asyncspec_protocol.messages import PassTimes

TINY_SHARE = 0.005
"""Of a pass: a line that takes less for a row bounds no segment, however fast it is."""


def tell_costs(state: VerifyState) -> tuple[VerifyState, Effects]:
    """What the draft nodes do not know yet, if there is any."""
    if not state.drafts or not state.cost.sizes:
        return state, ()
    news = state.cost.news()
    if news is None and not _line_changed(state):
        return state, ()
    cost = news or state.cost
    state = replace(state, cost=cost, row_seconds_told=state.row_seconds)
    # A slow line is told of at once, with what is known of passes: segments queue before it.
    table = cost.table() if cost.told else cost.averages()
    times = PassTimes(state.config.rank, *table, state.row_seconds, cost.off.relative)
    return state, tuple([Send(draft, times) for draft in state.drafts])


def _line_changed(state: VerifyState) -> bool:
    """Whether draft nodes should hear of the line now."""
    told = state.row_seconds_told
    change = abs(state.row_seconds - told)
    return change > NEWS * told and change > TINY_SHARE * min(state.cost.averages()[1])
