"""Answers to status queries: of the nodes, and of the first stage's plan.

A client queries a draft node, which queries the others and passes on their answers. Every query
ends: a disconnected node's status is not waited for, and the plan has a deadline.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from typing import ClassVar, Protocol

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.actor.link import Link
from asyncspec.actor.routing import LinkService, Senders
from asyncspec.actor.runtime import Runtime
from asyncspec.backend.base import DeviceMemory, host_memory
from asyncspec.backend.prefix_files import PrefixFiles
from asyncspec_nodes.node.resources import available_bytes, resident_bytes
from asyncspec_nodes.roles.draft.admission import slots_used
from asyncspec_nodes.roles.draft.recovery import missing_peers, no_link
from asyncspec_nodes.roles.draft.session import FIRST, DraftState
from asyncspec_nodes.roles.verify.planning import plan_status
from asyncspec_nodes.roles.verify.session import VerifyState
from asyncspec_nodes.serving.requests import ServingConfig
from asyncspec_nodes.serving.totals import Totals
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import Hello, Inspect, PlanStatus, PlanStatusRequest, Status

ANSWER_SECONDS = 5.0
"""A first stage answers within a step of its machine."""

MEMORY_SECONDS = 1.0
"""Between looks at this process's memory, which read several of the kernel's files."""

MAX_PLAN_QUERIES = 64
"""In progress at a draft node."""


class StatusSink(Protocol):
    """Receives statuses: a client's link, or this process itself."""

    def send(self, message: Status, /) -> object:
        """Queue a status."""


class _StatusQuery(Struct):
    """In progress on the draft node, under a number of its own."""

    requester: StatusSink
    # The requester's number.
    number: int
    # Nodes whose status is still to come.
    waiting: set[Rank]


class _PlanQuery(Struct):
    requester: Link
    number: int
    deadline: asyncio.TimerHandle


class Inspector(LinkService):
    """Answers for one node. ``serving``, ``totals``, ``draft`` (what drafts): of a draft node."""

    senders: ClassVar[Senders] = {
        Inspect: ("client", "draft"),
        Status: ("verify", "source"),
        PlanStatusRequest: ("client", "draft"),
        PlanStatus: ("verify", "source"),
    }

    def __init__(
        self,
        runtime: Runtime,
        me: Hello,
        model: str = "",
        serving: ServingConfig | None = None,
        totals: Totals | None = None,
        draft: str = "",
        device: str = "",
        device_memory: Callable[[], DeviceMemory | None] = host_memory,
        clock: Callable[[], float] = time.monotonic,
        machine: str = "",
        prefixes: PrefixFiles | None = None,
    ) -> None:
        """``machine``: what the node's is called; empty: by the host's name."""
        self._machine = machine or socket.gethostname()
        self._prefixes = prefixes
        self._runtime = runtime
        self._totals = totals
        self._links_lost = 0
        self._me = me
        self._model = model
        self._serving = serving
        self._draft = draft
        # Why the process takes no requests, whatever the pipeline; empty where it does.
        self.refuses: Callable[[], str] = lambda: ""
        # What the node's head has learned.
        self.learning: Callable[[], Mapping[str, float]] = dict
        self._device, self._device_memory = device, device_memory
        self._clock = clock
        self._started = self._memory_due = clock()
        self._memory = 0, 0
        self._numbers = count()
        self._status_queries: dict[int, _StatusQuery] = {}
        self._plan_queries: dict[int, _PlanQuery] = {}
        runtime.add(self)

    def received(
        self,
        link: Link,
        message: Inspect | Status | PlanStatusRequest | PlanStatus,
        data: memoryview | None,
    ) -> None:
        """Raises ``RemoteProtocolError`` where a node without the plan is queried or answers."""
        is_draft, number = self._me.role == "draft", message.query
        match message:
            case Inspect() if is_draft:
                self.ask(link, number)
            case Inspect():
                link.send(self.status(number))
            case Status():
                query = self._status_queries.get(number)
                if query is not None and link.rank in query.waiting:
                    answer = replace(message, query=query.number, rank=link.rank, last=False)
                    query.requester.send(answer)
                    query.waiting.discard(link.rank)
                    self._end_if_complete(number)
            case PlanStatusRequest() if is_draft:
                self._ask_first_stage(link, number)
            case PlanStatusRequest() if self._me.rank == FIRST:
                link.send(plan_status(self._runtime.state, number))
            case PlanStatus() if link.rank == FIRST:
                self._end_plan_query(number, message)
            case _:
                raise RemoteProtocolError("only the first stage has a plan")

    def ask(self, requester: StatusSink, number: int) -> None:
        """Send the status of every node; the draft node's own is the first and the last."""
        requester.send(self.status(number))
        key, links = next(self._numbers), self._runtime.links
        self._status_queries[key] = _StatusQuery(requester, number, set(links))
        for link in links.values():
            link.send(Inspect(key))
        self._end_if_complete(key)

    def lost(self, link: Link, reason: str) -> None:
        self._links_lost += link.rank >= 0
        for key, query in list(self._status_queries.items()):
            if query.requester is link:
                del self._status_queries[key]
            else:
                query.waiting.discard(link.rank)
                self._end_if_complete(key)
        for key, plan_query in list(self._plan_queries.items()):
            if plan_query.requester is link:
                self._plan_queries.pop(key).deadline.cancel()
            elif link.rank == FIRST:
                self._end_plan_query(key, _no_plan("is gone"))

    def _end_if_complete(self, key: int) -> None:
        if not self._status_queries[key].waiting:
            query = self._status_queries.pop(key)
            query.requester.send(replace(self.status(query.number), last=True))

    def _ask_first_stage(self, requester: Link, number: int) -> None:
        first = self._runtime.links.get(FIRST)
        if first is None:
            requester.send(replace(_no_plan("is not linked to this draft node"), query=number))
            return
        if len(self._plan_queries) >= MAX_PLAN_QUERIES:
            raise RemoteProtocolError(f"{MAX_PLAN_QUERIES} plan queries are in progress already")
        key = next(self._numbers)
        late = _no_plan(f"does not answer within {ANSWER_SECONDS:g} s")
        deadline = asyncio.get_running_loop().call_later(
            ANSWER_SECONDS, self._end_plan_query, key, late
        )
        self._plan_queries[key] = _PlanQuery(requester, number, deadline)
        first.send(PlanStatusRequest(key))

    def _end_plan_query(self, key: int, answer: PlanStatus) -> None:
        """An answer after the deadline is ignored."""
        query = self._plan_queries.pop(key, None)
        if query is not None:
            query.deadline.cancel()
            query.requester.send(replace(answer, query=query.number))

    @property
    def _is_cut(self) -> bool:
        """Whether no answer can pass from this stage on to the next one. Why it has been refused,
        if it has, says more."""
        runtime, me = self._runtime, self._me
        if me.role != "verify" or me.rank == me.stages:
            return False
        return me.rank + 1 not in {*runtime.links, *runtime.refusals}

    def status(self, number: int) -> Status:
        """The status of this node alone."""
        runtime, me, serving = self._runtime, self._me, self._serving
        state, links = runtime.state, sorted(runtime.links.items())
        sessions = waiting = slots = room = 0
        reasons: list[str] = []
        passes: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
        if isinstance(state, DraftState):
            sessions, waiting, room = len(state.sessions), len(state.backlog), slots_used(state)
            reasons = [] if state.up else [missing_peers(state)]
            reasons += filter(None, (self.refuses(),))
        elif isinstance(state, VerifyState):
            sessions, waiting, room = len(state.sessions), len(state.queue), state.config.slots
            slots = sum(session.slots.used for session in state.sessions.values())
            passes = state.cost.averages()
            reasons = [no_link(me.rank)] if self._is_cut else []
        memory, (resident, available) = self._device_memory(), self._own_memory()
        totals: dict[str, float] = {}
        if me.role == "verify":
            totals = {"passes": runtime.passes, "rows": runtime.rows}
        totals |= {"links_lost": self._links_lost, **self.learning()}
        if (files := self._prefixes) is not None and isinstance(state, VerifyState):
            dropped = state.stored_prefixes.dropped
            totals |= {"disk_bytes": files.nbytes, "disk_hits": files.hits}
            totals |= {"disk_tokens": files.tokens, "disk_dropped": dropped}
        for rank, why in sorted(runtime.refusals.items()):
            reasons.append(f"{'the token source' if rank > me.stages else f'stage {rank}'}: {why}")
        return Status(
            query=number,
            rank=me.rank,
            role=me.role,
            layers=me.layers,
            up_seconds=self._clock() - self._started,
            busy_seconds=runtime.busy_seconds,
            memory_bytes=resident,
            sessions=sessions,
            waiting=waiting,
            slots=slots,
            peers=tuple(rank for rank, _ in links),
            round_trips=tuple(-1.0 if link.rtt is None else link.rtt for _, link in links),
            sent=tuple(link.bytes_sent for _, link in links),
            model=self._model,
            context_length=0 if serving is None else serving.context_length,
            missing="; ".join(reasons),
            is_cut=self._is_cut,
            room=room,
            defaults={} if serving is None else serving.defaults.given,
            tool_syntax="" if serving is None else serving.chat.syntax,
            takes_tools=serving is not None and serving.chat.takes_tools,
            reasoning="" if serving is None else serving.chat.reasoning,
            template_options=() if serving is None else serving.chat.options,
            totals=totals | dict({} if self._totals is None else self._totals.sums),
            distributions={} if self._totals is None else dict(self._totals.distributions),
            host=self._machine,
            free_bytes=available,
            pass_rows=passes[0],
            pass_seconds=passes[1],
            draft=self._draft,
            device=self._device,
            device_free_bytes=0 if memory is None else memory.free,
            device_held_bytes=0 if memory is None else memory.held,
        )

    def _own_memory(self) -> tuple[int, int]:
        """Bytes that this process holds and could have: of the last ``MEMORY_SECONDS``, as clients
        may ask at any rate, or older where it has no file left to look them up with."""
        if (now := self._clock()) >= self._memory_due:
            self._memory_due = now + MEMORY_SECONDS
            with suppress(OSError):
                self._memory = resident_bytes(), available_bytes()
        return self._memory


def _no_plan(why: str) -> PlanStatus:
    return PlanStatus(0, f"verify stage 1, which plans, {why}")
