"""Messages of a session: begin and end, segments and verdicts, requests for drafts."""

from __future__ import annotations

from operator import lt
from typing import Annotated

from msgspec import Meta

from .base import Depths, PromptLogprobs, TensorSpec, WireMessage, check_depths, require
from .ids import NodeId, Rank, SegmentId, SessionId, Version
from .limits import (
    MAX_CANDIDATES,
    MAX_CAPACITY,
    MAX_COBATCHED,
    MAX_FEATURES,
    MAX_NODES,
    MAX_PREFIX_KEYS,
    MAX_TOP_LOGPROBS,
    MAX_TREE_NODES,
    PREFIX_KEY_BYTES,
    Count,
    LogProb,
    Seconds,
    Token,
)
from .sampling import (
    UNCONSTRAINED,
    Constraint,
    MinP,
    Penalty,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
)

SegmentNodes = Annotated[tuple[NodeId, ...], Meta(max_length=MAX_NODES)]
TreeSize = Annotated[int, Meta(ge=0, le=MAX_NODES)]
TreeParents = Annotated[tuple[Annotated[int, Meta(ge=-1)], ...], Meta(max_length=MAX_TREE_NODES)]
PrefixKey = Annotated[bytes, Meta(min_length=PREFIX_KEY_BYTES, max_length=PREFIX_KEY_BYTES)]
PrefixKeys = Annotated[tuple[PrefixKey, ...], Meta(max_length=MAX_PREFIX_KEYS)]
"""Names of a text: hashes of its first 16, 32, 48, ... tokens, and of whose text it is."""
BatchRemaining = Annotated[int, Meta(ge=0, lt=MAX_COBATCHED)]


class Open(WireMessage, array_like=True, frozen=True, tag="open"):
    """Starts a session. Travels down the pipeline, so it arrives before the first segment."""

    session: SessionId
    # Nodes 0..prompt_length-1 are committed from the start.
    prompt_length: Annotated[int, Meta(ge=1)]
    # Largest number of tokens (prompt and answer) this session can reach: admission by memory.
    capacity: Annotated[int, Meta(le=MAX_CAPACITY)]
    # The token drawn at a position is a function of these and the logits alone. Any 64 bits.
    seed: int
    # 0 is greedy.
    temperature: Temperature
    # 0: no limit.
    top_k: TopK
    # 1: no limit.
    top_p: TopP
    # 0: no limit.
    min_p: MinP = 0.0
    # Penalties on tokens of a row's own path; with any of them, segments bear tokens everywhere.
    # 1: none. On those of prompt and answer.
    repetition_penalty: RepetitionPenalty = 1.0
    # 0: none. On those of the answer: once, and for each time.
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    # Tokens at the end of the prompt that are answer, of an earlier session of the same request.
    resumed_tokens: Count = 0
    # What the token source reads of the target, for every node. Empty: nothing travels.
    features: Depths = ()
    # Every verdict has so many of the target's likeliest tokens with their probabilities, for
    # policies that do not always take the drawn one, and users. 0: none.
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    # Every verdict has the log-probability of each drawn token, for users.
    log_probs: bool = False
    # Its first ``common_prefix`` prompt nodes are those of this session, whose prompt every stage
    # has computed and still holds: they are taken over from there and never sent. -1: of none.
    parent_session: SessionId = SessionId(-1)
    common_prefix: Count = 0
    # Segments of it that wait at a stage may share a pass, where that costs less than one for each.
    coalesce: bool = False
    # Nodes of its tree at most: its cache may come to ``capacity`` and these. -1: not known, counts
    # as ``MAX_TREE_NODES``.
    max_tree_nodes: Annotated[int, Meta(ge=-1, le=MAX_TREE_NODES)] = -1
    # With a grammar segments bear tokens everywhere, as with penalties.
    constraint: Constraint = UNCONSTRAINED
    # Verdicts have the log-probability of every prompt token but the first, and so many of the
    # likeliest in its place. -1: they do not.
    prompt_logprobs: Annotated[int, Meta(ge=-1, le=MAX_TOP_LOGPROBS)] = -1
    # A stage that has a disk cache stores the prompt under these names once it is read, as a kill
    # may end the session. Empty: it does not.
    stored_as: PrefixKeys = ()

    def check(self) -> None:
        length, parent = self.prompt_length, self.parent_session
        require(self.session >= 0 and length <= self.capacity, "a session holds its prompt")
        require(self.resumed_tokens < length, "resumed tokens come after the user's prompt")
        require(self.common_prefix < length, "a prompt's last token is never shared")
        scored = self.prompt_logprobs >= 0
        require(not (scored and self.common_prefix), "a prompt that is scored is read as a whole")
        older = 0 <= parent < self.session if self.common_prefix else parent == -1
        require(older, "a common prefix is that of an older session")
        check_depths(self.features)


class Close(WireMessage, array_like=True, frozen=True, tag="close"):
    """Ends a session at every stage at once; may overtake its ``Open``."""

    session: SessionId
    # The prompt stays in the cache, for sessions that begin like it, until a second ``Close``.
    keep: bool = False
    # And so many tokens in all, the first of the answer behind it: its path must be committed so
    # far. 0: the prompt alone.
    kept_tokens: Count = 0
    # As in ``Open``, for what is kept.
    stored_as: PrefixKeys = ()


class Restore(WireMessage, array_like=True, frozen=True, tag="restore"):
    """A stage reads as much as it has on disk of a text into its cache, as the kept prompt of a
    session that never opens. Sent straight to every stage, which answers with ``Closed``."""

    session: SessionId
    stored_as: PrefixKeys


class Closed(WireMessage, array_like=True, frozen=True, tag="closed"):
    """A stage's statistics of a session that it has freed."""

    session: SessionId
    rank: Rank
    # Forward passes, rows in them, and rows whose node was dead before the pass had ended.
    passes: Count
    rows: Count
    dead_rows: Count
    # Time the device spent on this session's passes, in seconds.
    compute_seconds: Seconds
    # Bytes this stage wrote for the session, headers included.
    bytes_sent: Count
    # Its prompt stays in the cache; the ``Close`` that ends that is answered as well.
    kept: bool = False
    # After a ``Restore``: tokens that are in the cache now.
    restored: Count = 0


class Floor(WireMessage, array_like=True, frozen=True, tag="floor"):
    """The pipeline is up (again): every session below ``first`` is over, also one whose ``Open`` is
    still on its way. Sent straight to every stage."""

    first: SessionId


class Segment(WireMessage, array_like=True, frozen=True, tag="segment", gc=False):
    """A few nodes that travel the pipeline in one forward pass.

    Tensor: hidden states [n, H]; with ``aux_states`` [n, 1 + aux_states, H], those of earlier
    stages behind.
    """

    session: SessionId
    # Names the pass in traces, credits and verdicts.
    segment: SegmentId
    # Smallest prune version that any stage had applied when the segment passed it. It comes back
    # in the verdict, so the draft node learns what every stage knows without an acknowledgement.
    applied: Version
    ids: Annotated[tuple[NodeId, ...], Meta(min_length=1, max_length=MAX_NODES)]
    # Ancestor masks and positions are derived from the parents; no mask matrix travels.
    parents: tuple[NodeId, ...]
    # Only the first stage embeds: empty between stages, where the tensor takes their place, unless
    # the last stage's draws depend on them: then a session's tokens go all the way (``Open``).
    tokens: tuple[Token, ...] = ()
    # Hidden states of earlier stages that travel with each row, by ``Open.features``. Repeated
    # here so that the receiver can compare the tensor's width with the session before it uses it.
    aux_states: Annotated[int, Meta(ge=0, le=MAX_FEATURES)] = 0
    # It had to wait for credit. If the receiver was idle meanwhile, its window is too small for the
    # latency of the link.
    waited: bool = False
    # So many segments of the same pass follow at once on this link: an idle receiver that did not
    # wait for them would need another pass for them, at every stage anew.
    batch_remaining: BatchRemaining = 0
    # Seconds it was at the stages before, waiting or computed: the rest of its round trip is links
    # and handling.
    stage_seconds: Seconds = 0.0
    # In which of its session's passes at the first stage it was, abandoned ones not counted, from 1
    # on. 0: in none yet.
    pass_number: Count = 0
    # With ``Open.prompt_logprobs`` the prompt token after each of the first rows, which the last
    # stage scores: that of a chunk's last row is in no segment yet.
    scored_tokens: Annotated[tuple[Token, ...], Meta(max_length=MAX_NODES)] = ()

    def check(self) -> None:
        ids, count = self.ids, len(self.ids)
        require(len(self.parents) == count, "every node of a segment has a parent")
        require(len(self.tokens) in (0, count), "every node of a segment has a token, or none")
        require(len(self.scored_tokens) <= count, "a node has at most one token scored")
        require(len(set(ids)) == count, "the nodes of a segment are distinct")
        require(all(map(lt, self.parents, ids)), "a parent is older than its child")

    def check_tensor(self, tensor: TensorSpec | None) -> None:
        if tensor is not None:
            require(tensor.shape[0] == len(self.ids), "a segment's tensor has a row per node")
            states = (1 + self.aux_states,) if self.aux_states else ()
            require(tensor.shape[1:-1] == states, "a row has its auxiliary states behind it")


class Verdict(WireMessage, array_like=True, frozen=True, tag="verdict", gc=False):
    """For each surviving node of a segment, the token the target says comes next.

    Tensor: features [len(feature_ids), F], where the session has some.
    """

    session: SessionId
    segment: SegmentId
    applied: Version
    # Prompt nodes before the last need no verdict and are not listed.
    ids: SegmentNodes
    # Drawn at the last stage, which holds the head: logits do not cross the network.
    tokens: tuple[Token, ...]
    # Nodes of the tensor's rows: all surviving ones, those that need no verdict too.
    feature_ids: SegmentNodes = ()
    # ``Open.top_logprobs`` likeliest tokens for each of ``ids``, best first, one node after the
    # other, and their log-probabilities in nats, before any sampling setting.
    top_tokens: tuple[Token, ...] = ()
    top_token_log_probs: tuple[LogProb, ...] = ()
    # Those of ``tokens`` themselves, with ``Open.log_probs``: a drawn token need not be one of the
    # likeliest.
    token_log_probs: tuple[LogProb, ...] = ()
    # So many verdicts of the same pass follow at once: what they allow to send goes out together.
    batch_remaining: BatchRemaining = 0
    # As in ``Segment``, all stages together.
    stage_seconds: Seconds = 0.0
    # As in ``Segment``.
    pass_number: Count = 0
    # Log-probabilities of ``Segment.scored_tokens``.
    prompt_logprobs: PromptLogprobs | None = None

    def check(self) -> None:
        nodes, top, featured = len(self.ids), len(self.top_tokens), self.feature_ids
        require(min((*self.ids, *featured), default=0) >= 0, "node ids do not go below 0")
        require(len(self.tokens) == nodes, "a verdict has one token per node")
        require(len(set(featured)) == len(featured), "a node is featured once")
        require(top == len(self.top_token_log_probs), "every likeliest token has a log-probability")
        require(top <= nodes * MAX_TOP_LOGPROBS, "a node has at most 256 likeliest tokens")
        require(not top or top % nodes == 0, "every node has as many likeliest tokens")
        drawn = len(self.token_log_probs)
        require(drawn in (0, nodes), "every token has a log-probability, or none")
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.check()

    def check_tensor(self, tensor: TensorSpec | None) -> None:
        if tensor is None:
            require(not self.feature_ids, "featured nodes have their features in a tensor")
        else:
            rows = tensor.shape[0] if len(tensor.shape) == 2 else 0
            require(0 < rows == len(self.feature_ids), "a verdict's tensor has a row per feature")


class PruneIndices(WireMessage, array_like=True, frozen=True, tag="prune", gc=False):
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

    def check(self) -> None:
        named = (*self.accepted, *self.keep)
        require(len(named) <= 4 * MAX_NODES, "a prune names too many nodes")
        require(min(self.horizon, *named, 0) >= 0, "node ids do not go below 0")


class Credit(WireMessage, array_like=True, frozen=True, tag="credit", gc=False):
    """The receiver of segments allows ``limit`` of them on this link since it came up."""

    limit: Count
    # Segments that may wait at the receiver now, without those that the link itself holds: it
    # follows the number of sessions that share a pass. 0: as many as the first ``limit``.
    room: Count = 0
    # Measured seconds of a row on the link. 0: not known.
    row_seconds: Seconds = 0.0


# --- Between the draft machine and a token source. In one process: input and result of a job. ---


def _check_tree(
    parents: tuple[int, ...], tokens: tuple[int, ...], scores: tuple[float, ...]
) -> None:
    require(len(parents) == len(tokens) == len(scores), "lists differ in length")
    require(all(p < i for i, p in enumerate(parents)), "a parent comes first")


class Expand(WireMessage, array_like=True, frozen=True, tag="expand", gc=False):
    """Requests a tree from a token source."""

    session: SessionId
    version: Version
    # Length of the committed path before ``committed``; 0 opens the session at the source.
    base: Count
    # Tokens committed since the last request.
    committed: Annotated[tuple[Count, ...], Meta(max_length=MAX_NODES)]
    # Levels to grow, children per node, and nodes wanted: the best (EAGLE-2's rule).
    depth: TreeSize
    width: TreeSize
    # 0 only moves the source's own context on (prefill).
    count: TreeSize
    # Nodes of a level that are expanded further; 0: as many as ``width``.
    beam: TreeSize = 0
    # Only the beam of a level stays (PipeDec's and SpecPipe's rule).
    fixed_width: bool = False
    # Children per node of each level, where levels differ (SpecInfer's shapes).
    widths: tuple[TreeSize, ...] = ()
    # A known part of the tree below the tip, as in ``Expanded``; the answer repeats what of it
    # leads to new nodes. Empty where growth starts at the tip.
    parents: TreeParents = ()
    tokens: tuple[Token, ...] = ()
    scores: tuple[LogProb, ...] = ()
    # Where to grow from: indices into that part, or -1 for the tip. Empty: the tip alone.
    frontier: TreeParents = ()
    # With ``base`` 0, for a source that remembers answers: whose it is (only sessions of the same
    # tenant profit from it), and how many of its tokens are the user's prompt.
    tenant: str = ""
    prompt_length: Count = 0
    # With ``base`` 0: what the answer behind ``prompt_length`` tokens must match; as in ``Open``.
    grammar: str = ""
    # Nodes are compared by chances as they came true in this session, not as a model states them.
    calibrated: bool = False

    def check(self) -> None:
        require(len(self.widths) in (0, self.depth), "every level has its width, or none")
        _check_tree(self.parents, self.tokens, self.scores)
        require(max(self.frontier, default=-1) < len(self.parents), "a frontier is known")
        rows = self.depth * max(self.beam or self.width, len(self.frontier))
        require(rows <= MAX_TREE_NODES, "a tree expands at most 8192 nodes")
        grown = rows * max(self.width, *self.widths, 0)
        require(grown <= MAX_CANDIDATES, "a tree has at most 2^16 candidates")


class Features(WireMessage, array_like=True, frozen=True, tag="features", gc=False):
    """What the target computed for committed positions, for a token source on a node of its own
    that reads it. Every position once and in order, before the ``Expand`` that commits the token
    after the last of them.

    Tensor: features [count, F] of the positions from ``start`` on.
    """

    session: SessionId
    start: Count
    count: Count

    def check_tensor(self, tensor: TensorSpec | None) -> None:
        rows = tensor.shape[0] if tensor is not None and len(tensor.shape) == 2 else 0
        require(rows == self.count, "features have a row per position")


class Expanded(WireMessage, array_like=True, frozen=True, tag="expanded", gc=False):
    """The answer to ``Expand``: best nodes first, every parent before its children."""

    session: SessionId
    version: Version
    # Length of the committed path that the tree starts from: tells a stale answer from a fresh one.
    base: int
    # Index into this very list, or -1 for the tip.
    parents: TreeParents
    tokens: tuple[Token, ...]
    # Cumulative log-probability from the tip, in nats; never above the parent's.
    scores: tuple[LogProb, ...]
    # Device time of a source on a node of its own; 0 on the draft node.
    seconds: Seconds = 0.0

    def check(self) -> None:
        _check_tree(self.parents, self.tokens, self.scores)


class Withdraw(WireMessage, array_like=True, frozen=True, tag="withdraw", gc=False):
    """The requested tree is no longer needed: the source may answer at once with what it has."""

    session: SessionId


SessionMessage = (
    Open
    | Restore
    | Floor
    | Segment
    | Verdict
    | PruneIndices
    | Credit
    | Close
    | Closed
    | Expand
    | Features
    | Expanded
    | Withdraw
)
