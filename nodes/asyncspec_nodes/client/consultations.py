"""The questions what is planned that are under way on one link."""

from __future__ import annotations

import asyncio

from asyncspec.errors import ClusterError
from asyncspec_protocol.messages import Consulted


class Consultations:
    """Each has one answer, or an end without one."""

    def __init__(self) -> None:
        self._answers: dict[int, asyncio.Future[Consulted]] = {}

    def ask(self, question: int) -> asyncio.Future[Consulted]:
        """The answer to a question that is about to be sent."""
        answer = self._answers[question] = asyncio.get_running_loop().create_future()
        return answer

    def forget(self, question: int) -> None:
        """Nobody waits for it any more."""
        del self._answers[question]

    def answer(self, told: Consulted) -> None:
        """A draft node has answered; who is missing was named by it."""
        answer = self._answers.get(told.question)
        if answer is None or answer.done():
            return
        if told.missing:
            answer.set_exception(ClusterError(told.missing))
        else:
            answer.set_result(told)

    def fail(self, error: ClusterError) -> None:
        """No more answers will come."""
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)
