"""When the other end of a member's connection counts as suspected, and as gone. Pure.

Both ends send ``Alive`` every ``PING_SECONDS``, from event loops that nothing blocks: stages
compute and load in processes of their own. Silence is counted in pings that did not come, so
nothing passes while this process was stopped itself.

- **Suspected**: silent for ``SUSPECT_SECONDS``, or without a connection. What would take over its
  layers begins to load them.
- **Gone**: silent for ``GONE_SECONDS`` without a connection. The kernel ends a connection on which
  it gets no acknowledgement for ``GONE_SECONDS`` (``TCP_USER_TIMEOUT``), whatever the processes do,
  so an unplugged machine is gone after 2 to 2.5 s. A killed process is gone at once where its port
  refuses connections.
- **Gone**, too: silent for ``STOPPED_SECONDS`` over a connection that stands: a stopped process, or
  a machine that is so busy. Nothing tells these from one that is just slow.
"""

from __future__ import annotations

from typing import Literal

PING_SECONDS = 0.5
SUSPECT_SECONDS = 1.0
GONE_SECONDS = 2.0
STOPPED_SECONDS = 6.0
"""More than a stop of 5 s, and than a process waits for its turn at load 20 (.2 s)."""

State = Literal["here", "suspected", "gone"]


class Presence:
    """Presence of one other end; here at first."""

    def __init__(self) -> None:
        self.is_connected = True
        self._missed = 0
        # Whether its process has ended for certain.
        self.has_ended = False

    @property
    def silent_seconds(self) -> float:
        """Since it was heard last, at least."""
        return max(0, self._missed - 1) * PING_SECONDS

    def received(self) -> None:
        """A message has come, or none could be read here."""
        self._missed = 0

    def disconnected(self) -> None:
        """The connection is over; it may connect again, which makes it a new presence."""
        self.is_connected = False

    def tick(self) -> None:
        """``PING_SECONDS`` have passed here."""
        self._missed += 1

    @property
    def state(self) -> State:
        """Now."""
        limit = STOPPED_SECONDS if self.is_connected else GONE_SECONDS
        if self.has_ended or self.silent_seconds >= limit:
            return "gone"
        late = self.silent_seconds >= SUSPECT_SECONDS
        return "suspected" if late or not self.is_connected else "here"
