"""A node's latest inputs, for the report of a crash."""

from __future__ import annotations

from collections import deque

from asyncspec.core.machine import Computed, Input, LinkDown, LinkUp, Received, TimerFired

KEPT_INPUTS = 40


class InputLog:
    """Keeps the last inputs, without their tensors."""

    def __init__(self) -> None:
        self._recent: deque[object] = deque(maxlen=KEPT_INPUTS)

    def append(self, event: Input) -> None:
        """Keep an input. Called for every one, so it is described only in ``report``."""
        if isinstance(event, Received) and event.tensor is not None:
            self._recent.append(Received(event.peer, event.message))
        elif isinstance(event, Computed):
            session = getattr(event.job, "session", "several")
            self._recent.append((type(event.job).__name__, session, event.seconds))
        else:
            self._recent.append(event)

    def report(self) -> str:
        """The last inputs, oldest first, a line each."""
        return "\n".join(map(_describe, self._recent))


def _describe(event: object) -> str:
    """One line, without text or long lists."""
    match event:
        case Received(peer, message):
            names = [n for n in ("session", "segment", "version") if hasattr(message, n)]
            fields = " ".join(f"{name}={getattr(message, name)}" for name in names)
            return f"received {type(message).__name__} from rank {peer} {fields}"
        case (job, session, seconds):
            return f"computed {job} of session {session} in {seconds:.4f} s"
        case TimerFired(timer):
            return f"fired {timer}"
        case LinkUp(peer):
            return f"link to rank {peer} up"
        case LinkDown(peer, reason):
            return f"link to rank {peer} down: {reason}"
        case _:
            return type(event).__name__.lower()
