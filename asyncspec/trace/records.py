"""The lines of a trace file (docs/reference/trace.md).

Inputs of machines are complete, so that a recording can be replayed; effects are summaries with
checksums; tensors and handles are left out. Fields are append-only, with defaults.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from asyncspec.core import machine
from asyncspec_protocol.messages import Expanded, Message, PromptLogprobs

FORMAT = 1


class TraceHeader(Struct, frozen=True, tag="trace", tag_field="event"):
    """The first line of a file."""

    format: int
    program: str
    # ISO 8601, UTC.
    created: str
    # Description of the run.
    title: str = ""


Settings = dict[str, int | float | str | bool | tuple[int, ...] | None]
"""A machine's configuration, by the names of its fields."""


def machine_settings(config: Struct) -> Settings:
    """The plain values of a machine's configuration: all but its policies."""
    fields = {name: getattr(config, name) for name in config.__struct_fields__}
    return {name: value for name, value in fields.items() if not isinstance(value, Mapping)}


class NodeRecord(Struct, frozen=True, tag="node", tag_field="event", omit_defaults=True):
    """The first line of each node. ``at`` (its own clock) and ``wall`` (Unix) are one moment."""

    rank: int
    at: float
    wall: float
    role: str
    stages: int
    layers: tuple[int, int] = (0, 0)
    dtype: str = ""
    mode: str = ""
    host: str = ""
    pid: int = 0
    # The machine's configuration, for replays.
    config: Settings = {}
    # Recorded from the machine's first step on.
    whole: bool = False
    # Token ids are hidden (``trace.masking``).
    masked: bool = False


class ReceivedMessage(Struct, frozen=True, array_like=True, tag="received", gc=False):
    """A message arrived; ``tensor``: it has one."""

    peer: int
    message: Message
    tensor: bool = False
    # Estimated transfer time of the tensor.
    seconds: float = 0.0


class JobResult(Struct, frozen=True, array_like=True, tag="computed", gc=False):
    """The ``job``-th job of this node (from 0) is done. Without ``tokens`` and ``expanded`` its
    result is a handle; ``has_features``: a handle beside the tokens."""

    job: int
    seconds: float
    tokens: tuple[int, ...] | None = None
    expanded: Expanded | None = None
    has_features: bool = False
    # As in ``SamplerOutput``.
    top_tokens: tuple[tuple[tuple[int, ...], tuple[float, ...]], ...] = ()
    token_log_probs: tuple[float, ...] = ()
    # Results of the passes or trees of a batch.
    parts: tuple[JobResult, ...] = ()
    # As in ``Computed``.
    waited: float = 0.0
    # As in ``SamplerOutput``.
    prompt_logprobs: PromptLogprobs | None = None


class TaskResult(Struct, frozen=True, array_like=True, tag="task_done", gc=False):
    """The last task of this name is done; its result is a pure function of its argument."""

    task: str


Input = (
    ReceivedMessage
    | JobResult
    | machine.TimerFired
    | machine.LinkUp
    | machine.LinkDown
    | machine.Submitted
    | machine.Cancelled
    | machine.Stopped
    | TaskResult
    | machine.PrefixRead
    | machine.PrefixWritten
)


class Sent(Struct, frozen=True, array_like=True, tag="send", gc=False):
    """A message was sent. ``nbytes`` is 0 if the link was down; ``session`` and ``segment`` are -1
    where the message has none; ``count`` is its number of nodes; ``check`` its CRC-32."""

    to: int
    kind: str
    session: int
    segment: int
    count: int
    nbytes: int
    check: int


class Issued(Struct, frozen=True, array_like=True, tag="compute", gc=False):
    """The ``job``-th job of this node was queued. ``check``: CRC-32 without handles."""

    job: int
    kind: str
    session: int
    segment: int
    rows: int
    check: int
    # Session, segment and rows of each pass or tree of a batch.
    parts: tuple[tuple[int, int, int], ...] = ()


class Reported(Struct, frozen=True, array_like=True, tag="report", gc=False):
    """A stage's statistics of a session (``Closed``)."""

    to: int
    session: int
    passes: int
    rows: int
    dead_rows: int
    nbytes: int


class AbandonedJob(Struct, frozen=True, array_like=True, tag="abandon", gc=False):
    """The device was requested to end a job early."""

    kind: str
    session: int
    segment: int = -1


class NextJob(Struct, frozen=True, array_like=True, tag="next", gc=False):
    """The job that the device starts by itself after the running one; empty: none."""

    kind: str = ""
    session: int = -1
    segment: int = -1
    rows: int = 0


class TaskRun(Struct, frozen=True, array_like=True, tag="run_task", gc=False):
    """A task was started. ``check``: CRC-32 of its argument."""

    task: str
    check: int


Effect = (
    Sent
    | Issued
    | AbandonedJob
    | NextJob
    | machine.Emit
    | machine.Finish
    | Reported
    | machine.SetTimer
    | TaskRun
    | machine.ReadPrefix
    | machine.WritePrefix
)


class Step(Struct, frozen=True, tag="step", tag_field="event", omit_defaults=True, gc=False):
    """One input of the machine and its effects, which were performed by ``until``.

    ``number`` counts the steps of the node from 0; a gap means lost lines.
    """

    rank: int
    number: int
    at: float
    until: float
    input: Input
    effects: tuple[Effect, ...] = ()
    # Why the input was refused.
    error: str = ""


class Ran(Struct, frozen=True, tag="ran", tag_field="event", omit_defaults=True, gc=False):
    """The device ran the ``job``-th job. ``rows``: see ``recorder.job_summary``."""

    rank: int
    job: int
    kind: str
    at: float
    until: float
    session: int = -1
    segment: int = -1
    rows: int = 0


class Blocked(Struct, frozen=True, tag="blocked", tag_field="event", gc=False):
    """``nbytes`` for a peer waited in the write buffer."""

    rank: int
    peer: int
    at: float
    until: float
    nbytes: int


class Probe(Struct, frozen=True, tag="probe", tag_field="event", gc=False):
    """The peer's clock read ``answered`` between ``asked`` and ``came`` on this node's clock."""

    rank: int
    peer: int
    asked: float
    answered: float
    came: float

    @property
    def round_trip(self) -> float:
        """Seconds."""
        return max(0.0, self.came - self.asked)


class Silence(Struct, frozen=True, tag="silence", tag_field="event", gc=False):
    """No bytes arrived from a peer, not even heartbeats."""

    rank: int
    peer: int
    at: float
    until: float


class Text(Struct, frozen=True, tag="text", tag_field="event", gc=False):
    """The text of emitted tokens; only if the user enables text in traces."""

    rank: int
    request: int
    tokens: tuple[int, ...]
    text: str


class Dropped(Struct, frozen=True, tag="dropped", tag_field="event", gc=False):
    """``count`` lines of a node were lost here: its buffer was full or the reader too slow."""

    rank: int
    count: int


class End(Struct, frozen=True, tag="end", tag_field="event", gc=False):
    """A node's last line: recording stopped. Missing if the run was killed."""

    rank: int
    at: float


Record = Step | Ran | Blocked | Probe | Silence | Text | Dropped | NodeRecord | End
Line = TraceHeader | Record


class Trace(Struct, frozen=True):
    """The content of a file. The lines of each node are in chronological order."""

    header: TraceHeader
    lines: tuple[Record, ...]


_PACK = msgspec.msgpack.Encoder().encode
ENCODER = msgspec.json.Encoder()
DECODER: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def checksum(value: object) -> int:
    """CRC-32 of the MessagePack form of a message or struct."""
    return zlib.crc32(_PACK(value))


def packed_bytes(value: object) -> int:
    """Length of the MessagePack form, which is quicker than to count what a line takes."""
    return len(_PACK(value))
