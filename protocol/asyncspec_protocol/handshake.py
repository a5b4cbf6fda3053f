"""Whether two nodes may work together; if not, which side must change."""

from __future__ import annotations

from msgspec.structs import asdict

from .ids import Rank, is_draft
from .messages import PROTOCOL_VERSION, Fault, Hello, Role, Welcome

NO_RANK = Rank(-1)

HANDSHAKE = "handshake"
"""Code of a ``Fault`` that refuses a peer for what it says of itself."""


HUB = "hub:"
"""How the fingerprint of a target begins that is named by its id on the Hugging Face Hub."""


def answer(me: Hello, peer: Hello | Welcome) -> Welcome | Fault:
    """The listening side's answer to ``peer``'s first frame; the dialling side uses it as well, to
    check a ``Welcome``, and sends nothing."""
    problem = _common(me, peer) or (_client(peer) if peer.role == "client" else _node(me, peer))
    if problem is not None:
        return Fault(HANDSHAKE, problem)
    return Welcome(**asdict(me))


def client_hello(cluster: str = "") -> Hello:
    """What a client says first. Without a name it takes whichever cluster is there, and its
    ``Welcome`` says which."""
    return Hello(PROTOCOL_VERSION, cluster, NO_RANK, "client", 0, (0, 0), "", "", "")


def role_of(rank: int, stages: int) -> Role:
    """What a node of a rank is: a draft node, a stage, or behind these the token source."""
    if is_draft(rank):
        return "draft"
    return "verify" if rank <= stages else "source"


def _common(me: Hello, peer: Hello | Welcome) -> str | None:
    if peer.protocol != me.protocol:
        older = "peer" if peer.protocol < me.protocol else "node"
        return (
            f"protocol {peer.protocol} meets protocol {me.protocol}: "
            f"upgrade the older side, the {older}"
        )
    if peer.cluster != me.cluster and not _takes_any(peer):
        return (
            f"cluster {peer.cluster!r} meets cluster {me.cluster!r}: "
            "give both sides the same [cluster] name (a client: the right --cluster NAME, or "
            "none), or correct the address"
        )
    return None


def _takes_any(peer: Hello | Welcome) -> bool:
    """A client that was given an address alone. Nodes that work together are never so open: one
    of another cluster would serve, and be served, unnoticed."""
    return isinstance(peer, Hello) and peer.role == "client" and not peer.cluster


def _client(peer: Hello | Welcome) -> str | None:
    """Who serves goes by rank, so a client must not bear one."""
    if peer.rank == NO_RANK:
        return None
    return f"a client calls itself rank {peer.rank}: clients say {NO_RANK}"


def _node(me: Hello, peer: Hello | Welcome) -> str | None:
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
    if peer.fingerprint != me.fingerprint:
        return (
            f"{who} holds another target model than rank {me.rank}: give both the same checkpoint"
        )
    if peer.dtype != me.dtype:
        return f"{who} computes in {peer.dtype}, rank {me.rank} in {me.dtype}: set one dtype"
    if peer.mode != me.mode:
        return f"{who} runs mode {peer.mode!r}, rank {me.rank} {me.mode!r}: set one mode"
    if peer.quantize != me.quantize:
        return (
            f"{who} keeps weights quantised {peer.quantize!r}, rank {me.rank} {me.quantize!r}: "
            "set one quantize"
        )
    return _layers(me, peer)


def _layers(me: Hello, peer: Hello | Welcome) -> str | None:
    """Neighbouring stages hold neighbouring layers."""
    if me.role != "verify" or peer.role != "verify" or abs(me.rank - peer.rank) != 1:
        return None
    first, second = (me, peer) if me.rank < peer.rank else (peer, me)
    if first.layers[1] == second.layers[0]:
        return None
    return (
        f"rank {first.rank} ends at layer {first.layers[1]} but rank {second.rank} starts at "
        f"{second.layers[0]}: correct the layers of one of them"
    )
