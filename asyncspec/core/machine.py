"""The contract of a role: ``step(state, input, now) -> (state, effects)``.

Law of this file: compute is an effect, time is an argument, and a machine never raises anything
but a ``ProtocolError``. The asyncio runtime and the simulator are two readers of the same effects,
so what is proven in the one is what runs in the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from asyncspec.core.accept import TargetOutput
from asyncspec.core.jobs import Job, Rows
from asyncspec.core.sampling import Sampling
from asyncspec_protocol.ids import Rank, SessionId
from asyncspec_protocol.messages import Message


class Request(Struct, frozen=True):
    """What a user wants: tokens after a prompt. ``request`` is unique on this draft node."""

    request: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    # Token ids that end the answer; the first of them to come is part of it.
    stop_tokens: frozenset[int]
    policy: str
    # Tokens come with their log-probabilities, and with so many of the likeliest in their place.
    log_probs: bool = False
    top_logprobs: int = 0
    # An opaque name: only requests of the same tenant share prompt prefixes. Requests without one
    # share among themselves.
    tenant: str = ""


# --- inputs -----------------------------------------------------------------------------------


class Received(Struct, frozen=True):
    """A message came from a peer. ``tensor`` is a device handle, where the message has one."""

    peer: Rank
    message: Message
    tensor: object | None = None
    # What the link takes for the tensor's bytes, as far as that is known: it goes by what large
    # frames have taken lately, not by this one.
    seconds: float = 0.0


class Computed(Struct, frozen=True):
    """A job that has a result is done."""

    job: Job
    result: object
    # Time the device spent on it.
    seconds: float = 0.0


class Fired(Struct, frozen=True):
    """A deadline that was armed has come."""

    timer: str


class Joined(Struct, frozen=True):
    """The link to a peer is up, for the first time or again."""

    peer: Rank


class Lost(Struct, frozen=True):
    """The link to a peer is down; what was on the way in either direction may be gone."""

    peer: Rank
    reason: str = ""


class Submitted(Struct, frozen=True):
    """A user's request has come (draft node only)."""

    request: Request


class Cancelled(Struct, frozen=True):
    """A user no longer wants a request (draft node only). Unknown ones are no error."""

    request: int


class Stopped(Struct, frozen=True):
    """The ``kept``-th of the tokens emitted for a request completes a stop string: there its answer
    ends (draft node only). One that is over already is no error."""

    request: int
    kept: int


class TaskDone(Struct, frozen=True):
    """The task that was asked for with ``RunTask(task, argument)`` has returned ``result``."""

    task: str
    argument: object
    result: object


Input = Received | Computed | Fired | Joined | Lost | Submitted | Cancelled | Stopped | TaskDone


# --- effects ----------------------------------------------------------------------------------


class Send(Struct, frozen=True):
    """Give a message to the link to ``to``; if that link is down the message is gone."""

    to: Rank
    message: Message
    tensor: Rows | None = None


class Compute(Struct, frozen=True):
    """Queue a job at the device. Comes back as ``Computed`` if it has a result."""

    job: Job


class Abandon(Struct, frozen=True):
    """The result of a queued job is of no use any more: the device ends it as soon as it can, with
    whatever it has, and it comes back as ``Computed`` all the same."""

    job: Job


class Next(Struct, frozen=True):
    """The device goes on with ``job`` by itself when ``after``, which is in service, has ended. In
    place of what was said before; None: it waits for what it will be asked for.

    Law: the step that is told of the end of ``after`` asks for this very job, before any other.
    Until then nothing has begun, and something else may be said.
    """

    after: Job
    job: Job | None


class Emit(Struct, frozen=True):
    """Certain tokens for the user; the first ``hits`` of them were nodes of the tree."""

    request: int
    tokens: tuple[int, ...]
    hits: int = 0
    session: SessionId = SessionId(-1)
    # What the target said in the place of each token, where the request asks for it.
    outputs: tuple[TargetOutput, ...] = ()


class Finish(Struct, frozen=True):
    """The end of a request. ``reason`` is "stop", "length", "cancelled" or "error"."""

    request: int
    reason: str
    stats: dict[str, float]
    detail: str = ""
    # The shell adds to ``bytes_sent`` what this node has written for the session.
    session: SessionId = SessionId(-1)
    # As in ``Finished``.
    code: str = ""
    # And for those sessions of the request that ended before, with a break of the pipeline.
    earlier: tuple[SessionId, ...] = ()

    @property
    def sessions(self) -> tuple[SessionId, ...]:
        """All that the request had."""
        return self.earlier if self.session < 0 else (*self.earlier, self.session)


class Report(Struct, frozen=True):
    """Send ``Closed`` for a session: the shell adds the bytes it has counted for it."""

    to: Rank
    session: SessionId
    passes: int
    rows: int
    dead_rows: int
    compute_seconds: float
    # As in ``Closed``.
    kept: bool = False


class Arm(Struct, frozen=True):
    """``Fired(timer)`` is due at ``at``; arming again moves the deadline, None disarms it."""

    timer: str
    at: float | None


class RunTask(Struct, frozen=True):
    """Call the function that the shell knows as ``task`` with ``argument``, beside the device and
    the event loop. Comes back as ``TaskDone``. Of one name a single task is under way at a time.
    """

    task: str
    argument: object


Task = Callable[[Any], object]
"""A pure function of its argument, a msgspec struct: a replay calls it again and gets the same."""

Effect = Send | Compute | Abandon | Next | Emit | Finish | Report | Arm | RunTask

S = TypeVar("S")


class Machine(Protocol[S]):
    """A role. ``step`` leaves ``state`` as it was, also where it raises ``ProtocolError``."""

    def step(self, state: S, event: Input, now: float) -> tuple[S, tuple[Effect, ...]]:
        """React to one input at time ``now`` (seconds, any origin, never going back)."""
