"""A node's latest inputs, for the story of a crash."""

from __future__ import annotations

from collections import deque

from asyncspec.core.machine import Computed, Input, LinkDown, LinkUp, Received, TimerFired

REMEMBERED = 40
"""Inputs that are kept."""


class InputLog:
    """Keeps what is worth telling of the last inputs."""

    def __init__(self) -> None:
        self._recent: deque[object] = deque(maxlen=REMEMBERED)

    def keep(self, event: Input) -> None:
        """Note an input. Done for every one, so it is put into words only when it is needed."""
        self._recent.append(_gist(event))

    def story(self) -> str:
        """The last inputs, oldest first, a line each."""
        return "\n".join(map(_brief, self._recent))


def _gist(event: Input) -> object:
    """What is kept of an input: no tensors. Of one that has none, all of it."""
    if isinstance(event, Received):
        return event if event.tensor is None else Received(event.peer, event.message)
    if isinstance(event, Computed):
        job = event.job
        return type(job).__name__, getattr(job, "session", "several"), event.seconds
    return event


def _brief(memo: object) -> str:
    """A remembered input in one line, without text or long lists."""
    match memo:
        case Received(peer, message):
            where = [
                f"{k}={getattr(message, k)}"
                for k in ("session", "segment", "version")
                if hasattr(message, k)
            ]
            return f"received {type(message).__name__} from rank {peer} {' '.join(where)}"
        case (job, session, seconds):
            return f"computed {job} of session {session} in {seconds:.4f} s"
        case TimerFired(timer):
            return f"fired {timer}"
        case LinkUp(peer):
            return f"joined rank {peer}"
        case LinkDown(peer, reason):
            return f"lost rank {peer}: {reason}"
        case _:
            return type(memo).__name__.lower()
