"""A link begins, is alive, and says why it ends."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from .ids import Rank, SessionId

PROTOCOL_VERSION = 1

Role = Literal["draft", "verify", "source", "client"]


class Facts(Struct, array_like=True, frozen=True):
    """Everything two nodes must agree on before they work."""

    protocol: int
    # Keeps two clusters on one network apart.
    cluster: str
    rank: Rank
    role: Role
    # Number of verify stages: ring positions follow from rank and stages.
    stages: int
    # Half-open range of target layers this node holds; (0, 0) where it holds none.
    layers: tuple[int, int]
    # dtype of hidden states on the wire, e.g. "float32".
    dtype: str
    # Of the target's configuration and weights index: two halves of two models do not make one.
    fingerprint: str
    # "exact" or "fast": bitwise equality needs the same kernels on every stage.
    mode: str
    # "none", "int8" or "int4": how stages keep the target's weights; half a model in int8 and
    # half in int4 are not the model that a reference decoder would run.
    quantize: str = "none"
    # Said by draft nodes: prompts are wrapped as a user's message by the target's chat template
    # unless a user wants otherwise. A client has no tokenizer to look into.
    chat_template: bool = False


class Hello(Facts, array_like=True, frozen=True, tag="hello"):
    """The dialling side's first frame."""


class Welcome(Facts, array_like=True, frozen=True, tag="welcome"):
    """The listening side's answer; the same facts, so that both sides check."""


class Ready(Struct, array_like=True, frozen=True, tag="ready"):
    """A stage tells the draft node whether its link to the next stage is up."""

    rank: Rank
    up: bool
    # Cache slots that it has memory for: what is admitted at a time must fit. 0: no bound.
    slots: int = 0
    # The highest session of that draft node that it has heard of: the next ones are above it, also
    # where the clock has been set back since. -1: of none.
    opened: SessionId = SessionId(-1)
    # Every session of that draft node below it is over here, as the last ``Floor`` has said: its
    # answer, by which the draft node knows what is free. -1: not said.
    floor: SessionId = SessionId(-1)


class Heartbeat(Struct, array_like=True, frozen=True, tag="heartbeat", gc=False):
    """Says that a silent peer is alive; the echo measures the round trip."""

    # Sender's clock, in seconds.
    sent: float
    # The peer's last ``sent``, later by as long as it has waited here for this beat: what is left
    # to the peer's clock is the way there and back. 0 if none has come.
    echo: float = 0.0
    # What the line takes for each byte it brings from the peer, by its large frames, in seconds; 0:
    # not known. Only the receiver can tell, and the sender packs rows by it.
    byte_seconds: float = 0.0


class Clock(Struct, array_like=True, frozen=True, tag="clock", gc=False):
    """Asks for the peer's clock, and is answered at once: traces of all nodes get one clock."""

    # Asker's clock, in seconds.
    asked: float
    # The answerer's clock; 0 in the question.
    answered: float = 0.0


class Fault(Struct, array_like=True, frozen=True, tag="fault"):
    """The last frame before a link is closed because of what the peer did or asked for."""

    # A short name scripts can test, e.g. "handshake", "protocol", "busy".
    code: str
    # One sentence that says which side must change, and how.
    text: str
