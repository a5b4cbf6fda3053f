"""How the nodes are: a client asks the draft node, which asks the others and passes on the answers.

Law of this file: a question is answered once by every node that is reachable, and ends: a node
that goes meanwhile is not waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.actor.link import Link
from asyncspec.actor.runtime import Runtime
from asyncspec_nodes.node.consultations import Consultations
from asyncspec_nodes.node.memory import resident_bytes
from asyncspec_nodes.serving.rules import Rules
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import Consult, Consulted, Hello, Inspect, Status


class Asker(Protocol):
    """Where answers go: a client's link, or this process itself."""

    def send(self, message: Status, /) -> object:
        """Queue an answer."""


class Counts(Struct, frozen=True):
    """What a machine has in hand: sessions, what waits for service, and cache slots in use."""

    sessions: int = 0
    waiting: int = 0
    slots: int = 0
    # Slots there are; on the draft node, those that what is admitted may need.
    room: int = 0
    # Draft node only: why nothing can be served.
    missing: str = ""


class _Question:
    """One that is under way, on the draft node."""

    def __init__(self, asker: Asker, number: int, missing: set[Rank]) -> None:
        self.asker = asker
        self.number = number
        self.missing = missing


class Inspector:
    """One node's answers. See ``asyncspec.actor.shell.Inspector``."""

    def __init__(
        self,
        runtime: Runtime[Any],
        me: Hello,
        count: Callable[[Any], Counts],
        *,
        model: str = "",
        rules: Rules | None = None,
    ) -> None:
        self._runtime = runtime
        self._me = me
        self._count = count
        self._model = model
        # Of a draft node.
        self._rules = rules
        self._started = time.monotonic()
        self._questions: dict[int, _Question] = {}
        self._next = 0
        self._consultations = Consultations(runtime, me)
        runtime.answer_by(self)

    def inspect(self, link: Link, message: Inspect) -> None:
        """See ``Inspector`` of the runtime."""
        if self._me.role == "draft":
            self.ask(link, message.question)
        else:
            link.send(self._status(message.question))

    def ask(self, asker: Asker, number: int) -> None:
        """Somebody asks the draft node for all of them."""
        asker.send(self._status(number))
        key, self._next = self._next, self._next + 1
        others = self._runtime.links
        self._questions[key] = _Question(asker, number, set(others))
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

    def consult(self, link: Link, message: Consult) -> None:
        """See ``Inspector`` of the runtime."""
        self._consultations.consult(link, message)

    def consulted(self, link: Link, message: Consulted) -> None:
        """See ``Inspector`` of the runtime."""
        self._consultations.consulted(link, message)

    def gone(self, link: Link) -> None:
        """See ``Inspector`` of the runtime."""
        self._consultations.gone(link)
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
        counts = self._count(runtime.state)
        links = sorted(runtime.links.items())
        return Status(
            question=number,
            rank=me.rank,
            role=me.role,
            layers=me.layers,
            up_seconds=time.monotonic() - self._started,
            busy_seconds=runtime.busy_seconds,
            memory_bytes=resident_bytes(),
            sessions=counts.sessions,
            waiting=counts.waiting,
            slots=counts.slots,
            peers=tuple(rank for rank, _ in links),
            round_trips=tuple(-1.0 if link.rtt is None else link.rtt for _, link in links),
            sent=tuple(link.bytes_sent for _, link in links),
            model=self._model,
            context_length=0 if rules is None else rules.context_length,
            missing="; ".join(filter(None, (counts.missing, *self._refusals()))),
            room=counts.room,
            defaults={} if rules is None else rules.defaults.said,
        )

    def _refusals(self) -> Iterator[str]:
        """Why nodes that this one dials are not linked to it, each with its name."""
        for rank, why in sorted(self._runtime.refusals.items()):
            yield f"{'the token source' if rank > self._me.stages else f'stage {rank}'}: {why}"
