"""What a machine of each role has in hand, for whoever inspects its node."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.actor.link import Link
from asyncspec.actor.runtime import Runtime
from asyncspec_nodes.node.resources import resident_bytes
from asyncspec_nodes.roles.draft.admission import slots_used
from asyncspec_nodes.roles.draft.machine import who_is_missing
from asyncspec_nodes.roles.draft.state import DraftState
from asyncspec_nodes.roles.verify.planning import plan_status
from asyncspec_nodes.roles.verify.session import VerifyState
from asyncspec_nodes.serving.requests import ServingConfig
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import Hello, Inspect, PlanStatus, PlanStatusRequest, Status


def node_counts(state: Any) -> NodeCounts:
    """Of a draft node, a stage, or a token source (which has none of these)."""
    if isinstance(state, DraftState):
        missing = "" if state.up else who_is_missing(state)
        taken = slots_used(state)
        return NodeCounts(len(state.sessions), len(state.backlog), 0, taken, missing)
    if isinstance(state, VerifyState):
        slots = sum(session.slots.used for session in state.sessions.values())
        return NodeCounts(len(state.sessions), len(state.queue), slots, state.config.slots)
    return NodeCounts()


# --- How the nodes are: a client asks the draft node, which asks the others and passes on the
# answers.
# Law of this file: a question is answered once by every node that is reachable, and ends: a node
# that goes meanwhile is not waited for.


class StatusSink(Protocol):
    """Where answers go: a client's link, or this process itself."""

    def send(self, message: Status, /) -> object:
        """Queue an answer."""


class NodeCounts(Struct, frozen=True):
    """What a machine has in hand: sessions, what waits for service, and cache slots in use."""

    sessions: int = 0
    waiting: int = 0
    slots: int = 0
    # Slots there are; on the draft node, those that what is admitted may need.
    room: int = 0
    # Draft node only: why nothing can be served.
    missing: str = ""


class _StatusQuery:
    """One that is under way, on the draft node."""

    def __init__(self, asker: StatusSink, number: int, missing: set[Rank]) -> None:
        self.asker = asker
        self.number = number
        self.missing = missing


class Inspector:
    """One node's answers. See ``asyncspec.actor.inbound.Inspector``."""

    def __init__(
        self,
        runtime: Runtime[Any],
        me: Hello,
        count: Callable[[Any], NodeCounts],
        *,
        model: str = "",
        rules: ServingConfig | None = None,
    ) -> None:
        self._runtime = runtime
        self._me = me
        self._count = count
        self._model = model
        # Of a draft node.
        self._rules = rules
        self._started = time.monotonic()
        self._questions: dict[int, _StatusQuery] = {}
        self._next = 0
        self._plan_status = PlanStatusRelay(runtime, me)
        runtime.set_inspector(self)

    def inspect(self, link: Link, message: Inspect) -> None:
        """See ``Inspector`` of the runtime."""
        if self._me.role == "draft":
            self.ask(link, message.question)
        else:
            link.send(self._status(message.question))

    def ask(self, asker: StatusSink, number: int) -> None:
        """Somebody asks the draft node for all of them."""
        asker.send(self._status(number))
        key, self._next = self._next, self._next + 1
        others = self._runtime.links
        self._questions[key] = _StatusQuery(asker, number, set(others))
        for link in others.values():
            link.send(Inspect(key))
        self._settle(key)

    def status(self, link: Link, message: Status) -> None:
        """See ``Inspector`` of the runtime."""
        question = self._questions.get(message.question)
        if question is None or link.rank not in question.missing:
            return
        answer = replace(message, question=question.number, rank=link.rank, last=False)
        question.asker.send(answer)
        question.missing.discard(link.rank)
        self._settle(message.question)

    def plan_status_request(self, link: Link, message: PlanStatusRequest) -> None:
        """See ``Inspector`` of the runtime."""
        self._plan_status.plan_status_request(link, message)

    def plan_status(self, link: Link, message: PlanStatus) -> None:
        """See ``Inspector`` of the runtime."""
        self._plan_status.plan_status(link, message)

    def gone(self, link: Link) -> None:
        """See ``Inspector`` of the runtime."""
        self._plan_status.gone(link)
        for key, question in list(self._questions.items()):
            if question.asker is link:
                del self._questions[key]
            else:
                question.missing.discard(link.rank)
                self._settle(key)

    def _settle(self, key: int) -> None:
        question = self._questions[key]
        if not question.missing:
            del self._questions[key]
            # The draft node's own once more: nothing comes after it.
            question.asker.send(replace(self._status(question.number), last=True))

    def _status(self, number: int) -> Status:
        runtime, me, rules = self._runtime, self._me, self._rules
        node_counts = self._count(runtime.state)
        links = sorted(runtime.links.items())
        return Status(
            question=number,
            rank=me.rank,
            role=me.role,
            layers=me.layers,
            up_seconds=time.monotonic() - self._started,
            busy_seconds=runtime.busy_seconds,
            memory_bytes=resident_bytes(),
            sessions=node_counts.sessions,
            waiting=node_counts.waiting,
            slots=node_counts.slots,
            peers=tuple(rank for rank, _ in links),
            round_trips=tuple(-1.0 if link.rtt is None else link.rtt for _, link in links),
            sent=tuple(link.bytes_sent for _, link in links),
            model=self._model,
            context_length=0 if rules is None else rules.context_length,
            missing="; ".join(filter(None, (node_counts.missing, *self._refusals()))),
            room=node_counts.room,
            defaults={} if rules is None else rules.defaults.said,
        )

    def _refusals(self) -> Iterator[str]:
        """Why nodes that this one dials are not linked to it, each with its name."""
        for rank, why in sorted(self._runtime.refusals.items()):
            yield f"{'the token source' if rank > self._me.stages else f'stage {rank}'}: {why}"


# --- What is planned: a client asks a draft node, which asks the first stage and passes on its
# answer.
# Law of this file: every question is answered once and soon; a first stage that is gone or says
# nothing is named in the answer.

FIRST = Rank(1)

ANSWER_SECONDS = 5.0
"""A first stage that works answers within a step of its machine."""

MOST = 64
"""Questions under way at a draft node."""


class _PlanStatusQuery(Struct):
    """One that is under way: who asks, by which number, and when it is given up."""

    asker: Link
    number: int
    timer: asyncio.TimerHandle


class PlanStatusRelay:
    """One node's part: a draft node passes on, the first stage answers."""

    def __init__(self, runtime: Runtime[Any], me: Hello) -> None:
        self._runtime = runtime
        self._me = me
        self._questions: dict[int, _PlanStatusQuery] = {}
        self._next = 0

    def plan_status_request(self, link: Link, message: PlanStatusRequest) -> None:
        """A client or a draft node asks. Raises ``RemoteProtocolError`` where nothing is known."""
        if self._me.role == "draft":
            self._ask(link, message.question)
        elif self._me.rank == FIRST:
            link.send(plan_status(self._runtime.state, message.question))
        else:
            raise RemoteProtocolError("only the first stage knows what is planned")

    def plan_status(self, link: Link, message: PlanStatus) -> None:
        """The first stage has answered; what comes too late is nobody's."""
        if link.rank != FIRST:
            raise RemoteProtocolError("only the first stage knows what is planned")
        self._settle(message.question, message)

    def gone(self, link: Link) -> None:
        """A link to a node or a client is gone."""
        for key, question in list(self._questions.items()):
            if question.asker is link:
                question.timer.cancel()
                del self._questions[key]
            elif link.rank == FIRST:
                self._settle(key, _nothing("is gone"))

    def _ask(self, asker: Link, number: int) -> None:
        first = self._runtime.links.get(FIRST)
        if first is None:
            asker.send(replace(_nothing("is not linked to this draft node"), question=number))
            return
        if len(self._questions) >= MOST:
            raise RemoteProtocolError(f"{MOST} questions are under way already")
        key, self._next = self._next, self._next + 1
        loop = asyncio.get_running_loop()
        late = _nothing(f"does not answer within {ANSWER_SECONDS:g} s")
        timer = loop.call_later(ANSWER_SECONDS, self._settle, key, late)
        self._questions[key] = _PlanStatusQuery(asker, number, timer)
        first.send(PlanStatusRequest(key))

    def _settle(self, key: int, answer: PlanStatus) -> None:
        question = self._questions.pop(key, None)
        if question is not None:
            question.timer.cancel()
            question.asker.send(replace(answer, question=question.number))


def _nothing(why: str) -> PlanStatus:
    return PlanStatus(0, f"verify stage 1, which plans, {why}")
