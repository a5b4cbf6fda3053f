"""What is planned: a client asks a draft node, which asks the first stage and passes on its answer.

Law of this file: every question is answered once and soon; a first stage that is gone or says
nothing is named in the answer.
"""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.actor.link import Link
from asyncspec.actor.runtime import Runtime
from asyncspec_nodes.machines.verify.consulted import consulted
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import Consult, Consulted, Hello

FIRST = Rank(1)

ANSWER_SECONDS = 5.0
"""A first stage that works answers within a step of its machine."""

MOST = 64
"""Questions under way at a draft node."""


class _Question(Struct):
    """One that is under way: who asks, by which number, and when it is given up."""

    asker: Link
    number: int
    timer: asyncio.TimerHandle


class Consultations:
    """One node's part: a draft node passes on, the first stage answers."""

    def __init__(self, runtime: Runtime[Any], me: Hello) -> None:
        self._runtime = runtime
        self._me = me
        self._questions: dict[int, _Question] = {}
        self._next = 0

    def consult(self, link: Link, message: Consult) -> None:
        """A client or a draft node asks. Raises ``RemoteProtocolError`` where nothing is known."""
        if self._me.role == "draft":
            self._ask(link, message.question)
        elif self._me.rank == FIRST:
            link.send(consulted(self._runtime.state, message.question))
        else:
            raise RemoteProtocolError("only the first stage knows what is planned")

    def consulted(self, link: Link, message: Consulted) -> None:
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
        self._questions[key] = _Question(asker, number, timer)
        first.send(Consult(key))

    def _settle(self, key: int, answer: Consulted) -> None:
        question = self._questions.pop(key, None)
        if question is not None:
            question.timer.cancel()
            question.asker.send(replace(answer, question=question.number))


def _nothing(why: str) -> Consulted:
    return Consulted(0, f"verify stage 1, which plans, {why}")
