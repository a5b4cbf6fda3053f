"""The contract of a role: ``step(state, input, now) -> (state, effects)``.

Compute is an effect, time is an argument, and a machine raises nothing but ``ProtocolError``. The
asyncio runtime (``actor.runtime``) and the simulator (``sim.world``) perform the same effects.
Inputs and effects with a ``tag`` are written to traces as they are: their fields are append-only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from asyncspec.core.accept import TargetOutput
from asyncspec.core.jobs import Job, TensorRows
from asyncspec.core.sampling import Sampling
from asyncspec_protocol.ids import Rank, SessionId
from asyncspec_protocol.messages import Closed, Message, PromptLogprobs


class Request(Struct, frozen=True):
    """A generation request. ``request`` is unique on this draft node."""

    request: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    # Token ids that end the answer; the first to occur is part of it.
    stop_tokens: frozenset[int]
    policy: str
    # Return the log-probability of each token, and those of the ``top_logprobs`` likeliest ones.
    log_probs: bool = False
    top_logprobs: int = 0
    # Only requests of one tenant share prompt prefixes; all without a name are one tenant.
    tenant: str = ""
    # The beginning of the answer, which the user has from an earlier draft node.
    given: tuple[int, ...] = ()
    # Likeliest tokens that are returned in the place of each prompt token, with the log-probability
    # of each but the first; -1: none is scored.
    prompt_logprobs: int = -1
    # The user has set no bound: ``max_new_tokens`` is what the context has room for, and less is
    # fine.
    unbounded: bool = False
    # ``Emit`` says how much of the prompt has been read.
    progress: bool = False
    # What the user wants of the target's hidden states, as in ``Open.features``.
    features: tuple[int, ...] = ()


class Received(Struct, frozen=True):
    """A message from a peer. ``tensor`` is the device handle of its tensor, if it has one."""

    peer: Rank
    message: Message
    tensor: object | None = None
    # Estimated transfer time of the tensor, from the bandwidth of recent large frames; 0: unknown.
    seconds: float = 0.0


class Computed(Struct, frozen=True):
    """The result of a job; jobs without a result produce no input."""

    job: Job
    result: object
    # Device time of the job, and the part of it in which other work had the processor.
    seconds: float = 0.0
    waited: float = 0.0


class TimerFired(Struct, frozen=True, array_like=True, tag="fired", gc=False):
    """The deadline of a timer has passed."""

    timer: str


class LinkUp(Struct, frozen=True, array_like=True, tag="joined", gc=False):
    """The link to a peer is up, for the first time or again."""

    peer: Rank


class LinkDown(Struct, frozen=True, array_like=True, tag="lost", gc=False):
    """The link to a peer is down; messages in flight in either direction may be lost."""

    peer: Rank
    reason: str = ""
    # Seconds since the peer was heard last.
    silent: float = 0.0


class Submitted(Struct, frozen=True, array_like=True, tag="submitted"):
    """A new request (draft node only)."""

    request: Request


class Cancelled(Struct, frozen=True, array_like=True, tag="cancelled", gc=False):
    """The user cancelled a request (draft node only). Unknown requests are ignored."""

    request: int


class Stopped(Struct, frozen=True, array_like=True, tag="stopped", gc=False):
    """A stop string ends an answer after ``length`` tokens. Finished requests are ignored."""

    request: int
    length: int


class TaskDone(Struct, frozen=True):
    """The task of ``RunTask(task, argument)`` has returned ``result``."""

    task: str
    argument: object
    result: object


class PrefixRead(Struct, frozen=True, array_like=True, tag="prefix_read", gc=False):
    """The answer to ``ReadPrefix``: the first ``tokens`` are there, in ``parts``."""

    session: SessionId
    tokens: int
    # As in ``Import``.
    parts: object = None


class PrefixWritten(Struct, frozen=True, array_like=True, tag="prefix_written", gc=False):
    """The answer to ``WritePrefix``: so many tokens are stored; -1: nothing more can be."""

    session: SessionId
    tokens: int


Input = (
    Received
    | Computed
    | TimerFired
    | LinkUp
    | LinkDown
    | Submitted
    | Cancelled
    | Stopped
    | TaskDone
    | PrefixRead
    | PrefixWritten
)


class Send(Struct, frozen=True):
    """Send a message to rank ``to``; it is dropped if the link is down."""

    to: Rank
    message: Message
    tensor: TensorRows | None = None


class Compute(Struct, frozen=True):
    """Queue a job at the device. Its result, if it has one, comes back as ``Computed``."""

    job: Job


class Abandon(Struct, frozen=True):
    """A job's result is not needed: the device returns a partial one as soon as it can."""

    job: Job


class RunNext(Struct, frozen=True):
    """The device starts ``job`` as soon as the running job ``after`` ends, without waiting for the
    machine. Replaces the previous ``RunNext``; None withdraws it. The step that receives the result
    of ``after`` must issue ``Compute(job)`` before any other job."""

    after: Job
    job: Job | None


class Emit(Struct, frozen=True, array_like=True, tag="emit", gc=False):
    """Committed tokens for the user; the first ``hits`` of them were nodes of the tree."""

    request: int
    tokens: tuple[int, ...]
    hits: int = 0
    session: SessionId = SessionId(-1)
    # The target's log-probabilities for each token, if requested.
    outputs: tuple[TargetOutput, ...] = ()
    # Those of the prompt, if requested, before the first token; in parts, as they came.
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    # Tokens of the prompt that were taken over from the prefix cache.
    shared_tokens: int = 0
    # Without tokens: those of the prompt that stages have, if requested.
    prompt_read: int = 0
    # Without tokens: the target's features of positions from ``features_start`` on, if requested.
    features: TensorRows | None = None
    features_start: int = 0


class Finish(Struct, frozen=True, array_like=True, tag="finish"):
    """The end of a request. ``reason`` is "stop", "length", "cancelled" or "error"."""

    request: int
    reason: str
    session: SessionId = SessionId(-1)
    # The runtime adds to ``bytes_sent`` what this node has sent for the sessions.
    stats: dict[str, float] = {}
    detail: str = ""
    # As in ``Finished``.
    code: str = ""
    # Earlier sessions of the request, each ended by a pipeline failure.
    earlier: tuple[SessionId, ...] = ()

    @property
    def sessions(self) -> tuple[SessionId, ...]:
        """All sessions of the request."""
        return self.earlier if self.session < 0 else (*self.earlier, self.session)


class SendClosed(Struct, frozen=True):
    """Send ``Closed`` for a session; the runtime adds the bytes sent for it."""

    to: Rank
    session: SessionId
    passes: int
    rows: int
    dead_rows: int
    compute_seconds: float
    # As in ``Closed``.
    kept: bool = False
    restored: int = 0

    def message(self, rank: Rank, sent: int) -> Closed:
        """The message of node ``rank``, which has sent so many bytes for the session."""
        work = (self.passes, self.rows, self.dead_rows, self.compute_seconds)
        return Closed(self.session, rank, *work, sent, self.kept, self.restored)


class SetTimer(Struct, frozen=True, array_like=True, tag="arm", gc=False):
    """Set the deadline of a timer to ``at``, replacing the previous one; None cancels it."""

    timer: str
    at: float | None


class RunTask(Struct, frozen=True):
    """Call the host's function named ``task`` with ``argument``, beside the device and the event
    loop. Comes back as ``TaskDone``. At most one task of a name is under way at a time."""

    task: str
    argument: object


class ReadPrefix(Struct, frozen=True, array_like=True, tag="read_prefix", gc=False):
    """Read what is on disk of the text with the names ``keys``, beside device and event loop."""

    session: SessionId
    keys: tuple[bytes, ...]


class WritePrefix(Struct, frozen=True, array_like=True, tag="write_prefix", gc=False):
    """Store tokens [start, end) of the text with the names ``keys`` on disk, beside device and
    event loop; without any, say how much of it is there."""

    session: SessionId
    keys: tuple[bytes, ...]
    start: int = 0
    end: int = 0
    # As ``Export`` results in.
    arrays: object = None


Task = Callable[[Any], object]
"""A pure function of its argument, a msgspec struct: a replay calls it again and gets the same."""

Effect = (
    Send
    | Compute
    | Abandon
    | RunNext
    | Emit
    | Finish
    | SendClosed
    | SetTimer
    | RunTask
    | ReadPrefix
    | WritePrefix
)
Effects = tuple[Effect, ...]

S = TypeVar("S")


class PrefixStore(Protocol):
    """Beginnings of texts on disk, as a stage's cache has them. Called on threads of their own."""

    def read(self, keys: Sequence[bytes]) -> tuple[int, object]:
        """How many of the first tokens are there, and these, as ``PrefixRead.parts``."""

    def write(self, keys: Sequence[bytes], start: int, end: int, arrays: object) -> int:
        """As ``WritePrefix``; returns ``PrefixWritten.tokens``."""


def access_prefix(
    store: PrefixStore, effect: ReadPrefix | WritePrefix
) -> PrefixRead | PrefixWritten:
    """Perform an effect on stored prefixes; returns the input that it ends with."""
    session, keys = effect.session, effect.keys
    if isinstance(effect, ReadPrefix):
        return PrefixRead(session, *store.read(keys))
    return PrefixWritten(session, store.write(keys, effect.start, effect.end, effect.arrays))


class Machine(Protocol[S]):
    """A role. ``step`` does not modify ``state``, even if it raises ``ProtocolError``."""

    def step(self, state: S, event: Input, now: float) -> tuple[S, Effects]:
        """Handle one input at time ``now`` (seconds, any origin, monotonic)."""


class TraceHook(Protocol):
    """Receives the events of one node from the runtime or the simulator, in seconds of the node's
    clock. Implementations are cheap, never raise and keep no tensor handles."""

    def stepped(
        self,
        event: Input,
        effects: Effects,
        sizes: Sequence[int],
        at: float,
        until: float,
        error: str = "",
    ) -> None:
        """The machine handled an input at ``at``; its effects were performed by ``until``.
        ``sizes``: bytes sent by each effect. ``error``: why the input was refused."""

    def ran(self, job: Job, at: float, until: float) -> None:
        """The device finished a job. Called in issue order, before the machine gets the result."""

    def blocked(self, peer: Rank, at: float, until: float, nbytes: int) -> None:
        """The write buffer was above the event loop's high-water mark (64 KiB)."""

    def probed(self, peer: Rank, asked: float, answered: float, came: float) -> None:
        """A clock probe: the peer's clock read ``answered`` between ``asked`` and ``came``."""

    def silent(self, peer: Rank, at: float, until: float) -> None:
        """No bytes arrived from a peer for more than two heartbeat intervals."""
