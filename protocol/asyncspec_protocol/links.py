"""Messages of a link, and the handshake: may two nodes work together, or which must change?"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta
from msgspec.structs import asdict

from .base import Depths, WireMessage, check_depths
from .ids import Rank, SessionId, is_draft
from .limits import Count, Seconds

PROTOCOL_VERSION = 1

Role = Literal["draft", "verify", "source", "client"]

NO_RANK = Rank(-1)

HANDSHAKE = "handshake"
"""Code of a ``Fault`` that refuses a peer because of its ``Hello`` or ``Welcome``."""

HUB = "hub:"
"""How the fingerprint of a target begins that is named by its id on the Hugging Face Hub."""

GGUF_PREFIX = "gguf:"
"""How the fingerprint of a target begins that llama.cpp computes."""


MIXED = "mixed:"
"""How the fingerprint of a target begins whose file has another format on some stages."""


MAX_PROCESSOR = 64
"""Characters of the name of a kind of processor."""


class Facts(WireMessage, array_like=True, frozen=True):
    """Everything two nodes must agree on before they work."""

    protocol: Count
    # Keeps two clusters on one network apart.
    cluster: str
    rank: Rank
    role: Role
    # Number of verify stages: ring positions follow from rank and stages.
    stages: Count
    # Half-open range of target layers this node holds; (0, 0) where it holds none.
    layers: tuple[Count, Count]
    # dtype of hidden states on the wire, e.g. "float32".
    dtype: str
    # Hash of the target's configuration and weights index: all stages hold parts of one model.
    fingerprint: str
    # "exact" or "fast": bitwise equality needs the same kernels on every stage.
    mode: str
    # "none", "int8" or "int4": how stages keep the target's weights; half a model in int8 and
    # half in int4 are not the model that a reference decoder would run.
    quantize: str = "none"
    # A draft node wraps prompts as a user's message by the target's chat template unless a user
    # wants otherwise. A client has no tokenizer to look into.
    chat_template: bool = False
    # As in ``Ready``; of a draft node, for its clients.
    crash: Count = 0


class Hello(Facts, array_like=True, frozen=True, tag="hello"):
    """The dialling side's first frame."""


class Welcome(Facts, array_like=True, frozen=True, tag="welcome"):
    """The listening side's answer; the same facts, so that both sides check."""


class Ready(WireMessage, array_like=True, frozen=True, tag="ready"):
    """A stage reports to the draft node whether its link to the next stage is up."""

    rank: Rank
    up: bool
    # Cache slots that it has memory for: what is admitted at a time must fit. 0: no bound.
    slots: Count = 0
    # The highest session of that draft node that the stage has seen: the next ones are above it,
    # also where the clock has been set back since. -1: none.
    opened: SessionId = SessionId(-1)
    # Every session of that draft node below it is over here: the last ``Floor``, so that the draft
    # node knows what is free. -1: none has come.
    floor: SessionId = SessionId(-1)
    # What a token source's node reads of the target, as in ``Open.features``.
    features: Depths = ()
    # Where the link is down: seconds since the next stage was heard last. A break that the draft
    # node has seen meanwhile and this one are the same.
    silent: Seconds = 0.0
    # Stage: the kind of processor that computes, and the layers [first, end) it computes: another
    # kind may round differently. Empty: not known.
    processor: Annotated[str, Meta(max_length=MAX_PROCESSOR)] = ""
    layers: tuple[Count, Count] = (0, 0)
    # Stage: when the kernel ended its last process for want of memory while it had requests, whose
    # longest is too long. Names that event; milliseconds since 1970. 0: it did not.
    memory_kill: Count = 0
    # When the last process crashed, by itself, while it had requests: all of them are suspects.
    # Names that event as ``memory_kill`` does.
    crash: Count = 0
    # Stage: it has a disk cache, for ``Close.stored_as`` and ``Restore``.
    stores_prefixes: bool = False

    def check(self) -> None:
        check_depths(self.features)


class Heartbeat(WireMessage, array_like=True, frozen=True, tag="heartbeat", gc=False):
    """Shows that a silent peer is alive; the echo measures the round trip."""

    # Sender's clock, in seconds.
    sent: Seconds
    # The peer's last ``sent``, later by as long as it has waited here for this beat: the peer's
    # clock minus it is the round trip. 0 if none has come.
    echo: Seconds = 0.0
    # Seconds a byte from the peer, measured on large frames; 0: not known. Only the receiver can
    # measure it, and the sender packs rows by it.
    byte_seconds: Seconds = 0.0


class Clock(WireMessage, array_like=True, frozen=True, tag="clock", gc=False):
    """Requests the peer's clock, answered at once: traces of all nodes get one clock."""

    # Clock of the requesting side, in seconds.
    asked: Seconds
    # Clock of the answering side; 0 in the request.
    answered: Seconds = 0.0


class Fault(WireMessage, array_like=True, frozen=True, tag="fault"):
    """The last frame before a link is closed because of what the peer did."""

    # A short name scripts can test, e.g. "handshake", "protocol", "busy".
    code: str
    # One sentence that says which side must change, and how.
    text: str


LinkMessage = Hello | Welcome | Ready | Heartbeat | Clock | Fault


def answer(me: Hello, peer: Hello | Welcome) -> Welcome | Fault:
    """The answer to ``peer``'s first frame; the dialling side checks a ``Welcome`` with it."""
    problem = _cluster_problem(me, peer) or _node_problem(me, peer)
    return Welcome(**asdict(me)) if problem is None else Fault(HANDSHAKE, problem)


def client_hello(cluster: str = "") -> Hello:
    """A client's first frame; without a name any cluster accepts it, and says its own."""
    return Hello(PROTOCOL_VERSION, cluster, NO_RANK, "client", 0, (0, 0), "", "", "")


def role_of(rank: int, stages: int) -> Role:
    """The role of a rank: a draft node, a stage, or behind these the token source."""
    if is_draft(rank):
        return "draft"
    return "verify" if rank <= stages else "source"


def _cluster_problem(me: Hello, peer: Hello | Welcome) -> str | None:
    if peer.protocol != me.protocol:
        older = "peer" if peer.protocol < me.protocol else "node"
        return (
            f"protocol {peer.protocol} meets protocol {me.protocol}: "
            f"upgrade the older side, the {older}"
        )
    # Only a client may be nameless: a node of another cluster would serve and be served unnoticed.
    nameless = isinstance(peer, Hello) and peer.role == "client" and not peer.cluster
    if peer.cluster != me.cluster and not nameless:
        return (
            f"cluster {peer.cluster!r} meets cluster {me.cluster!r}: "
            "give both sides the same [cluster] name (a client: the right --cluster NAME, or "
            "none), or correct the address"
        )
    return None


def _node_problem(me: Hello, peer: Hello | Welcome) -> str | None:
    if peer.role == "client":  # a link is found by its rank, so a client must not have one
        named = f"a client calls itself rank {peer.rank}: clients say {NO_RANK}"
        return None if peer.rank == NO_RANK else named
    if me.role == "client":
        return None
    who = f"rank {peer.rank}"
    drafts = is_draft(peer.rank)
    if drafts and is_draft(me.rank):
        return f"{who} dials rank {me.rank}: draft nodes are linked to stages, not to each other"
    if peer.rank == me.rank or not (drafts or 0 < peer.rank <= me.stages + 1):
        return f"{who} does not fit here: rank {me.rank} of {me.stages} stages needs other ranks"
    if peer.role != role_of(peer.rank, me.stages):
        return f"{who} has the role {peer.role}: rank 0 drafts, 1 to {me.stages} verify"
    if peer.stages != me.stages:
        return f"{who} counts {peer.stages} stages, rank {me.rank} counts {me.stages}: use one file"
    if peer.fingerprint.startswith(HUB) != me.fingerprint.startswith(HUB):
        return (
            f"one of {who} and rank {me.rank} has the target from the Hub by its id, the other in "
            "a directory, which cannot be compared: name it alike on both"
        )
    if peer.fingerprint.startswith(GGUF_PREFIX) != me.fingerprint.startswith(GGUF_PREFIX):
        return (
            f"one of {who} and rank {me.rank} has the target as GGUF, the other does not, and they "
            "round differently: name the same file on both"
        )
    if peer.fingerprint != me.fingerprint:
        return (
            f"{who} holds another target model than rank {me.rank}: give both the same checkpoint"
        )
    for name in ("dtype", "mode", "quantize"):
        theirs, ours = getattr(peer, name), getattr(me, name)
        if theirs != ours:
            return f"{who} has {name} {theirs!r}, rank {me.rank} {ours!r}: set one {name}"
    # Neighbouring stages hold neighbouring layers.
    if me.role != "verify" or peer.role != "verify" or abs(me.rank - peer.rank) != 1:
        return None
    first, second = (me, peer) if me.rank < peer.rank else (peer, me)
    if first.layers[1] == second.layers[0]:
        return None
    return (
        f"rank {first.rank} ends at layer {first.layers[1]} but rank {second.rank} starts at "
        f"{second.layers[0]}: correct the layers of one of them"
    )
