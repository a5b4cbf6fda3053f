"""What flows through the pipeline: segments one way, verdicts and prunes the others."""

from __future__ import annotations

from msgspec import Struct

from .ids import NodeId, SegmentId, SessionId, Version


class Segment(Struct, array_like=True, frozen=True, tag="segment", gc=False):
    """A few nodes that travel the pipeline in one forward pass.

    Tensor: hidden states [n, H]; with ``taps`` [n, 1 + taps, H], the tapped ones behind.
    """

    session: SessionId
    # Names the pass in traces, credits and verdicts.
    segment: SegmentId
    # Smallest prune version that any stage had applied when the segment passed it. It comes back
    # in the verdict, so the draft node learns what every stage knows without an acknowledgement.
    applied: Version
    ids: tuple[NodeId, ...]
    # Ancestor masks and positions are derived from the parents; no mask matrix travels.
    parents: tuple[NodeId, ...]
    # Only the first stage embeds: empty between stages, where the tensor takes their place, unless
    # the last stage's draws depend on them: then a session's tokens go all the way (``Open``).
    tokens: tuple[int, ...] = ()
    # Hidden states of earlier stages that travel with each row, by ``Open.features``. Said here,
    # so that the receiver can hold the tensor's width against the session before it uses it.
    taps: int = 0
    # It had to wait for credit. If the receiver was idle meanwhile, its window is too small for the
    # latency of the link.
    waited: bool = False
    # So many segments of the same pass follow at once on this link: an idle receiver that did not
    # wait for them would need another pass for them, at every stage anew.
    batch_remaining: int = 0
    # Seconds it was at the stages before, waiting or computed, of a session that has told its
    # ``Rates``: what is left of its way is drafting and links. 0: nobody wants to know.
    stage_seconds: float = 0.0
    # In which of its session's passes at the first stage it was, those that were given up not
    # counted, from 1 on. 0: it was in none yet.
    pass_number: int = 0


class Verdict(Struct, array_like=True, frozen=True, tag="verdict", gc=False):
    """For each surviving node of a segment, the token the target says comes next.

    Tensor: features [len(feature_ids), F], where the session wants some.
    """

    session: SessionId
    segment: SegmentId
    applied: Version
    # Prompt nodes before the last need no verdict and are not listed.
    ids: tuple[NodeId, ...]
    # Drawn at the last stage, which holds the head: logits do not cross the network.
    tokens: tuple[int, ...]
    # Whose features the tensor's rows are: all surviving nodes, those that need no verdict too.
    feature_ids: tuple[NodeId, ...] = ()
    # ``Open.tops`` likeliest tokens for each of ``ids``, best first, one node after the other, and
    # their log-probabilities in nats, before any sampling setting.
    top_tokens: tuple[int, ...] = ()
    top_token_log_probs: tuple[float, ...] = ()
    # Those of ``tokens`` themselves, where ``Open.log_probs`` asks for them: a drawn token need not
    # be one of the likeliest.
    token_log_probs: tuple[float, ...] = ()
    # So many verdicts of the same pass follow at once: what they allow to send goes out together.
    batch_remaining: int = 0
    # As in ``Segment``, all stages together.
    stage_seconds: float = 0.0
    # As in ``Segment``.
    pass_number: int = 0


class PruneIndices(Struct, array_like=True, frozen=True, tag="prune", gc=False):
    """What is still alive. Sent straight to every stage, so that it overtakes what it concerns.

    A node with ``id < horizon`` that is neither accepted, kept nor already committed is dead, for
    ever. Cumulative and idempotent: ``accepted`` repeats what some stage may not know yet.
    """

    session: SessionId
    version: Version
    # The first node id this prune says nothing about.
    horizon: NodeId
    # Nodes on the committed path, oldest first, that may not yet be in every stage's cache.
    accepted: tuple[NodeId, ...]
    # Live nodes below the tip.
    keep: tuple[NodeId, ...]


class Floor(Struct, array_like=True, frozen=True, tag="floor"):
    """The pipeline stands (again): every session below ``first`` is over, also one whose ``Open``
    is still on its way. Sent straight to every stage."""

    first: SessionId


class Credit(Struct, array_like=True, frozen=True, tag="credit", gc=False):
    """The receiver of segments allows ``limit`` of them on this link since it came up."""

    limit: int
    # Segments that may wait at the receiver now, those that the link itself holds not counted: it
    # follows the number of sessions that share a pass. 0: as many as the first ``limit``.
    room: int = 0
    # Seconds the line is measured to take for a row. 0: not known.
    row_seconds: float = 0.0
