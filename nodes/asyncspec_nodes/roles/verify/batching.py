"""Which waiting segments share the next pass (dynamic batching, SpecPipe 4.4). Pure.

One segment of a session goes first: its order is the order in which they came. Decoding goes before
prompts, because a user waits for every token of an answer and once for a prompt; but nothing is
passed over for ever. Where rows cost, a pass has no more of them than its fair share (``fair``).
Then what waits behind it joins it, where the session wants that and passes are measured to cost
little more for it: on the plateau a segment that waits for a pass of its own is late for nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.cost_model.rows import BatchCost
from asyncspec_nodes.roles.verify.session import StageSession, Waiting
from asyncspec_nodes.roles.verify.state import VerifyState
from asyncspec_protocol.ids import SessionId

Queue = tuple[Waiting, ...]


class Share(Struct, frozen=True):
    """What of a pass sessions should share."""

    rows: int
    # Sessions that go whenever they are ready, and whose rows do not count.
    exempt: Collection[SessionId] = ()


def gather(
    queue: Queue,
    sessions: Mapping[SessionId, StageSession],
    most_rows: int,
    held: Collection[SessionId] = (),
    costs: BatchCost | None = None,
    fair: Share | None = None,
) -> tuple[Queue, Queue]:
    """What of a queue goes in the next pass, and what is left of it. Only a segment alone may have
    more than ``most_rows`` rows. ``held``: sessions whose turn is not yet; some others wait.
    Without known ``costs`` nothing joins, and no share is too large. ``fair``: None: any number
    of rows is."""
    if len(queue) == 1:
        return queue, ()
    heads: dict[SessionId, int] = {}
    for i, waiting in enumerate(queue):
        if waiting.session not in held:
            heads.setdefault(waiting.session, i)
    in_order = [i for _, i in sorted((_urgency(queue[i], sessions), i) for i in heads.values())]
    taken = _sharing(queue, sessions, in_order, most_rows, costs, fair)
    if costs is not None and len(taken) < len(queue):
        taken |= _joining(queue, sessions, taken, most_rows, costs)
    left = [
        replace(w, passed_over=w.passed_over + 1) if heads.get(w.session) == i else w
        for i, w in enumerate(queue)
        if i not in taken
    ]
    return itemgetter(*sorted(taken))(queue) if len(taken) > 1 else (queue[min(taken)],), tuple(
        left
    )


def _sharing(
    queue: Queue,
    sessions: Mapping[SessionId, StageSession],
    heads: Sequence[int],
    most_rows: int,
    costs: BatchCost | None,
    fair: Share | None,
) -> set[int]:
    """Which of the sessions' ``heads``, in this order, share a pass. A prompt's pieces are short,
    and few of them wait."""
    taken: set[int] = set()
    rows = shared = 0
    for i in heads:
        waiting, more = queue[i], len(queue[i].ids)
        if taken and rows + more > most_rows:
            continue
        shares = fair is not None and waiting.session not in fair.exempt
        if shared and costs is not None and fair is not None and shares:
            over = shared + more > fair.rows and not prompt(waiting, sessions[waiting.session])
            if over and not costs.is_cheap(len(taken), rows, more, PARAMETERS.oversize_delay):
                continue
        taken.add(i)
        rows += more
        shared += more if shares else 0
    return taken


def _joining(
    queue: Queue,
    sessions: Mapping[SessionId, StageSession],
    heads: Collection[int],
    most_rows: int,
    costs: BatchCost,
) -> set[int]:
    """What of a queue joins the ``heads``: of each session that wants it the next ones without a
    gap, as far as the line onward carries them. Nothing joins a prompt: it is read in pieces so
    that others need not wait for it, and its first token is not to wait for what is only guessed
    below it."""
    joining: set[int] = set()
    open_to = set[SessionId]()
    for head in (queue[i] for i in heads):
        session = sessions[head.session]
        if session.coalesce and head.ids[0] >= session.liveness.prompt_length:
            open_to.add(head.session)
    if not open_to:
        return joining
    rows = sum([len(queue[i].ids) for i in heads])
    for i, waiting in enumerate(queue):
        if waiting.session not in open_to or i in heads:
            continue
        more = len(waiting.ids)
        segments = len(heads) + len(joining)
        if rows + more <= most_rows and costs.joins(segments, rows, more):
            joining.add(i)
            rows += more
        else:
            open_to.discard(waiting.session)
    return joining


def _urgency(waiting: Waiting, sessions: Mapping[SessionId, StageSession]) -> int:
    """Smaller goes first; of equals, what came first."""
    if waiting.passed_over >= PARAMETERS.max_skips:
        return 0
    return 2 if prompt(waiting, sessions[waiting.session]) else 1


def prompt(waiting: Waiting, session: StageSession) -> bool:
    """True for a piece of a prompt, that with its last token included."""
    return waiting.ids[0] < session.liveness.prompt_length - 1


# --- How many rows a pass should have, so that sessions which share one do not stay together for
# ever.
# Sessions that share a pass come back, are drafted for and are sent together, and whatever meets
# them at the first stage stays with them from then on: nothing parts them again. Where rows are
# free that costs nothing. Where rows cost, a few long passes go round and most stages stand
# still. So the first stage, which makes the passes, gives each stage an even part of all rows to
# work on. Pure.


def fair_share(state: VerifyState) -> Share | None:
    """Rows of the first stage's next pass that sessions should share; None: any number, because who
    is verified together is decided by the stage before. So a plan decides (DiP-SD), or what plans
    are compared with: everybody who is ready. Sessions that may be planned for are exempt, and
    others share as if these were not there.

    An even part of the rows that wait or are under way, or half of those that could be in the pass,
    if these are more: more wait for a first stage that is slower than the others than for each of
    those, and it should not take them in small passes. A group that is too large is a fair one
    after a few times round.
    """
    config, exempt = state.config, state.schedule.members
    if config.rank != 1:
        return None
    sessions = {name: one for name, one in state.sessions.items() if name not in exempt}
    waiting, first = 0, dict[SessionId, int]()
    for one in state.queue:
        if one.session in sessions and not prompt(one, sessions[one.session]):
            waiting += len(one.ids)
            first.setdefault(one.session, len(one.ids))
    away = [_under_way(one) for name, one in sessions.items() if name not in first]
    seats = [len(sessions[name].slots.speculative) for name in first]
    even = -(-(waiting + sum(away) + sum(seats)) // config.stages)
    return Share(max(even, -(-sum(first.values()) // 2)), exempt.keys())


def _under_way(session: StageSession) -> int:
    """Rows of a session of which nothing waits. A row whose token is known already, as the only one
    of plain decoding, is no node of its tree any more."""
    seats = len(session.slots.speculative)
    decoding = session.slots.committed >= session.liveness.prompt_length
    return seats or int(decoding)
