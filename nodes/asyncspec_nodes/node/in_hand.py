"""Whether a node has a request: where it ends then, the request may be the cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from asyncspec.core.machine import Effects, Input, Machine

S = TypeVar("S")


class InHand:
    """Calls ``changed`` when the first of several parts of a node has a request, and when none has
    one any more."""

    def __init__(self, changed: Callable[[bool], None]) -> None:
        self._changed = changed
        self._parts: set[str] = set()

    def set(self, part: str, some: bool) -> None:
        """``part`` has requests, or none now."""
        had_some = bool(self._parts)
        if some:
            self._parts.add(part)
        else:
            self._parts.discard(part)
        if bool(self._parts) != had_some:
            self._changed(not had_some)


class WatchedMachine(Machine[S]):
    """``machine``, whose sessions and waiting requests ``in_hand`` is told of before the effects of
    a step are carried out."""

    def __init__(self, machine: Machine[S], in_hand: InHand) -> None:
        self._machine = machine
        self._in_hand = in_hand

    def step(self, state: S, event: Input, now: float) -> tuple[S, Effects]:
        state, effects = self._machine.step(state, event, now)
        watched: Any = state
        some = bool(watched.sessions) or bool(getattr(watched, "backlog", ()))
        self._in_hand.set("machine", some)
        return state, effects
