"""The words on the wire.

Law of this file: every message is one flat struct with an explicit tag; fields are only ever
appended, with a default; every field says why it travels. Node ids name everything, because
positions in somebody's array shift with every prune and ids do not (docs/protocol.md).
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from .ids import NodeId, Rank, SegmentId, SessionId, Version

PROTOCOL_VERSION = 1

Role = Literal["draft", "verify", "source", "client"]

FINAL = -1
"""In ``Open.features``: the last hidden state after the final norm, which the head reads."""


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
    # So many segments of the same pass, of other sessions, follow at once on this link: an idle
    # receiver that did not wait for them would need another pass for them, at every stage anew.
    more: int = 0
    # Seconds it was at the stages before, waiting or computed, of a session that has told its
    # ``Rates``: what is left of its way is drafting and links. 0: nobody wants to know.
    spent: float = 0.0


class Verdict(Struct, array_like=True, frozen=True, tag="verdict", gc=False):
    """For each surviving node of a segment, the token the target says comes next.

    Tensor: features [len(featured), F], where the session wants some.
    """

    session: SessionId
    segment: SegmentId
    applied: Version
    # Prompt nodes before the last need no verdict and are not listed.
    ids: tuple[NodeId, ...]
    # Drawn at the last stage, which holds the head: logits do not cross the network.
    tokens: tuple[int, ...]
    # Whose features the tensor's rows are: all surviving nodes, those that need no verdict too.
    featured: tuple[NodeId, ...] = ()
    # ``Open.tops`` likeliest tokens for each of ``ids``, best first, one node after the other, and
    # their log-probabilities in nats, before any sampling setting.
    likely: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    # Those of ``tokens`` themselves, where ``Open.log_probs`` asks for them: a drawn token need not
    # be one of the likeliest.
    drawn: tuple[float, ...] = ()
    # So many verdicts of the same pass follow at once: what they allow to send goes out together.
    more: int = 0
    # As in ``Segment``, all stages together.
    spent: float = 0.0


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


class Expand(Struct, array_like=True, frozen=True, tag="expand", gc=False):
    """Asks a token source to grow a tree. In one process: a computation's input."""

    session: SessionId
    version: Version
    # Length of the committed path before ``committed``; 0 opens the session at the source.
    base: int
    # Tokens committed since the source was last asked.
    committed: tuple[int, ...]
    # Levels to grow, children per node, and nodes wanted: the best (EAGLE-2's rule).
    depth: int
    width: int
    # 0 only moves the source's own context on (prefill).
    count: int
    # Nodes of a level that are expanded further; 0: as many as ``width``.
    beam: int = 0
    # Only the beam of a level stays (PipeDec's and SpecPipe's rule).
    fixed_width: bool = False
    # Children per node of each level, where levels differ (SpecInfer's shapes).
    widths: tuple[int, ...] = ()
    # A known part of the tree below the tip, as in ``Expanded``; the answer repeats what of it
    # leads to new nodes. Empty where growth starts at the tip.
    parents: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    # Where to grow from: indices into that part, or -1 for the tip. Empty: the tip alone.
    frontier: tuple[int, ...] = ()


class Expanded(Struct, array_like=True, frozen=True, tag="expanded", gc=False):
    """The answer to ``Expand``: best nodes first, every parent before its children."""

    session: SessionId
    version: Version
    # Length of the committed path the tree hangs from: tells a stale answer from a fresh one.
    base: int
    # Index into this very list, or -1 for the tip.
    parents: tuple[int, ...]
    tokens: tuple[int, ...]
    # Cumulative log-probability from the tip, in nats; never above the parent's.
    scores: tuple[float, ...]
    # Time the source's device spent on it, where that is not the draft node's own.
    seconds: float = 0.0


class Withdraw(Struct, array_like=True, frozen=True, tag="withdraw", gc=False):
    """What a source was asked for is of no use any more: it may answer at once with what it has."""

    session: SessionId


class Hello(Struct, array_like=True, frozen=True, tag="hello"):
    """The dialling side's first frame. Everything two nodes must agree on before they work."""

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


class Welcome(Struct, array_like=True, frozen=True, tag="welcome"):
    """The listening side's answer; the same facts, so that both sides check."""

    protocol: int
    cluster: str
    rank: Rank
    role: Role
    stages: int
    layers: tuple[int, int]
    dtype: str
    fingerprint: str
    mode: str
    quantize: str = "none"


class Ready(Struct, array_like=True, frozen=True, tag="ready"):
    """A stage tells the draft node whether its link to the next stage is up."""

    rank: Rank
    up: bool
    # Cache slots that it has memory for: what is admitted at a time must fit. 0: no bound.
    slots: int = 0


class Open(Struct, array_like=True, frozen=True, tag="open"):
    """Starts a session. Travels down the pipeline, so it arrives before the first segment."""

    session: SessionId
    # Nodes 0..prompt_length-1 are committed from the start.
    prompt_length: int
    # Largest number of tokens (prompt and answer) this session can reach: admission by memory.
    capacity: int
    # The token drawn at a position is a function of these and the logits alone.
    seed: int
    # 0 is greedy.
    temperature: float
    # 0: no limit.
    top_k: int
    # 1: no limit.
    top_p: float
    # 0: no limit.
    min_p: float = 0.0
    # Penalties on tokens of a row's own path; with any of them, segments bear tokens everywhere.
    # 1: none. On those of prompt and answer.
    repetition_penalty: float = 1.0
    # 0: none. On those of the answer: once, and for each time.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # Tokens at the end of the prompt that are answer, of an earlier session of the same request.
    given: int = 0
    # What the token source reads of the target, for every node: the residual stream after so many
    # layers, ascending, or ``FINAL`` alone. Empty: nothing, and nothing travels.
    features: tuple[int, ...] = ()
    # Of every verdict so many of the target's likeliest tokens come with their probabilities, for
    # policies that do not always take the one that was drawn. 0: none do.
    tops: int = 0
    # The log-probability of every drawn token comes with it, for users who ask for it.
    log_probs: bool = False
    # Its first ``shared`` prompt nodes are those of the session ``like``, whose prompt every stage
    # has computed and still holds: they are taken over from there and never sent. -1: of none.
    like: SessionId = SessionId(-1)
    shared: int = 0


class Floor(Struct, array_like=True, frozen=True, tag="floor"):
    """The pipeline stands (again): every session below ``first`` is over, also one whose ``Open``
    is still on its way. Sent straight to every stage."""

    first: SessionId


class Close(Struct, array_like=True, frozen=True, tag="close"):
    """Ends a session at every stage at once; may overtake its ``Open``."""

    session: SessionId
    # The prompt stays in the cache, for sessions that begin like it, until a second ``Close``.
    keep: bool = False


class Closed(Struct, array_like=True, frozen=True, tag="closed"):
    """A stage's account of a session it has freed."""

    session: SessionId
    rank: Rank
    # Forward passes, rows in them, and rows whose node was dead before the pass had ended.
    passes: int
    rows: int
    dead_rows: int
    # Time the device spent on this session's passes, in seconds.
    compute_seconds: float
    # Bytes this stage wrote for the session, headers included.
    bytes_sent: int


class Credit(Struct, array_like=True, frozen=True, tag="credit", gc=False):
    """The receiver of segments allows ``limit`` of them on this link since it came up."""

    limit: int
    # Segments that may wait at the receiver now, those that the link itself holds not counted: it
    # follows the number of sessions that share a pass. 0: as many as the first ``limit``.
    room: int = 0


class PassTimes(Struct, array_like=True, frozen=True, tag="times"):
    """A stage tells the draft node what its passes take, when it has changed: what rows cost
    decides how many are worth sending where many sessions share passes."""

    rank: Rank
    # Rows, ascending, and the mean seconds of passes over about so many.
    rows: tuple[float, ...]
    seconds: tuple[float, ...]
    # What the line from the stage before takes for a row of a segment; 0: not known. Where it is
    # slow, rows that travel make verdicts come later.
    row_seconds: float = 0.0
    # Relative deviation of a pass from what these say: who waits for somebody waits for it.
    jitter: float = 0.0


class Rates(Struct, array_like=True, frozen=True, tag="rates"):
    """A draft node tells the first stage what it has measured of a session whose policy may be
    planned: when its first answer token is out, and when it has changed noticeably."""

    session: SessionId
    # Rounds that were measured; 0: none yet, the session only takes part.
    rounds: int = 0
    # A cautious chance of a drafted token to be accepted (a lower confidence bound).
    alpha: float = 0.0
    # Of a draft: for each token, for each call of the source, and on the links.
    token_seconds: float = 0.0
    call_seconds: float = 0.0
    link_seconds: float = 0.0
    # Relative deviation of a draft's seconds.
    jitter: float = 0.0
    # The mean that the cautious chance is below, and the other end of its interval.
    mean: float = 0.0
    high: float = 0.0
    # Relative deviation of the links' seconds.
    link_jitter: float = 0.0


class Schedule(Struct, array_like=True, frozen=True, tag="schedule"):
    """The first stage tells a draft node what is planned for a session that has told its
    ``Rates``. Another one that comes later counts."""

    session: SessionId
    # Counts the first stage's plans.
    version: int
    # Which batch it is verified in, of how many; of 0: whoever is ready is verified.
    batch: int
    batches: int
    # Tokens of its drafts.
    length: int


class Heartbeat(Struct, array_like=True, frozen=True, tag="heartbeat", gc=False):
    """Says that a silent peer is alive; the echo measures the round trip."""

    # Sender's clock, in seconds.
    sent: float
    # The peer's last ``sent``, 0 if none has come.
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


class Submit(Struct, array_like=True, frozen=True, tag="submit"):
    """A client asks the draft node for text."""

    # Chosen by the client, unique on its link.
    request: int
    prompt: str
    max_new_tokens: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float = 0.0
    # Node-level default where empty.
    policy: str = ""
    ignore_eos: bool = False
    # As in ``Open``.
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # Texts that end the answer before the first of them, or with it.
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    # The prompt as tokens, taken as they are; or as a conversation, a JSON list of messages that
    # the target's chat template makes a prompt of. Then ``prompt`` is empty.
    prompt_ids: tuple[int, ...] = ()
    chat: str = ""
    # Every token of the answer comes with its log-probability, and with so many of the likeliest.
    log_probs: bool = False
    tops: int = 0
    # Refused where the context has no room for ``max_new_tokens`` behind the prompt; else they are
    # cut to what there is.
    must_fit: bool = False


class Output(Struct, array_like=True, frozen=True, tag="output"):
    """New text for a client, as soon as it is certain."""

    request: int
    token_ids: tuple[int, ...]
    text: str
    # Where ``Submit.log_probs`` asks for them, of each of ``token_ids``, in nats, before any
    # sampling setting; and ``Submit.tops`` likeliest tokens with theirs, one token after the other.
    log_probs: tuple[float, ...] = ()
    likely: tuple[int, ...] = ()
    likely_log_probs: tuple[float, ...] = ()
    # The bytes that those tokens mean, of ``token_ids`` and then of ``likely``: a client has no
    # tokenizer.
    spelled: tuple[bytes, ...] = ()


class Finished(Struct, array_like=True, frozen=True, tag="finished"):
    """The end of a request: ``stop``, ``length``, ``cancelled`` or ``error``."""

    request: int
    reason: str
    # For "error": the sentence the user reads.
    detail: str
    # Counters, named and defined in docs/metrics.md.
    stats: dict[str, float]
    # For "error": a short name scripts can test, e.g. "busy".
    code: str = ""


class Cancel(Struct, array_like=True, frozen=True, tag="cancel"):
    """A client no longer wants a request; its slots are freed everywhere."""

    request: int


class Collect(Struct, array_like=True, frozen=True, tag="collect"):
    """Asks for a node's trace. A client asks the draft node, which asks the stages."""

    # Chosen by the asker; the answers bear it.
    collection: int
    # From so many seconds ago on; -1: all there is.
    last: float
    # Go on with what happens from now; else end with what there is.
    follow: bool
    # End a collection that follows.
    stop: bool = False


class Events(Struct, array_like=True, frozen=True, tag="events"):
    """Part of a node's trace. Tensor: whole lines of JSON in UTF-8, uint8 [n]."""

    collection: int
    # Whose; -1 with ``done``: of the whole collection.
    rank: Rank
    # Nothing more comes.
    done: bool = False
    # Why a node has nothing to give, if so.
    reason: str = ""


class Inspect(Struct, array_like=True, frozen=True, tag="inspect"):
    """Asks how nodes are. A client asks the draft node, which asks the others and passes on what
    they answer."""

    # Chosen by the asker; the answers bear it.
    question: int


class Status(Struct, array_like=True, frozen=True, tag="status"):
    """How a node is now."""

    question: int
    # Whose.
    rank: Rank
    role: Role
    layers: tuple[int, int]
    # Since it serves, and how long of that its device has worked: differences give busy shares.
    up_seconds: float
    busy_seconds: float
    # Resident memory of the process.
    memory_bytes: int
    # Sessions here; requests (draft node) or segments (stage) that wait; cache slots in use.
    sessions: int
    waiting: int
    slots: int
    # Its links: peers, round trips by heartbeats in seconds (upper bounds; -1: not known), bytes
    # written.
    peers: tuple[Rank, ...] = ()
    round_trips: tuple[float, ...] = ()
    sent: tuple[int, ...] = ()
    # Nothing more comes to this question.
    last: bool = False
    # Draft node only: what it serves, and to how many tokens, prompt and answer together.
    model: str = ""
    context_length: int = 0
    # Draft node only: why no request can be served now; empty where one can.
    missing: str = ""
    # Cache slots there are in all on a stage, 0: no bound; and on the draft node those that may be
    # needed by what is admitted.
    room: int = 0


class Consult(Struct, array_like=True, frozen=True, tag="consult"):
    """Asks what users are planned for, and how. A client asks a draft node, which asks the first
    stage and passes on what it answers."""

    # Chosen by the asker; the answer bears it.
    question: int


class Consulted(Struct, array_like=True, frozen=True, tag="consulted"):
    """The first stage's answer: what it has been told of the users whose sessions may be planned,
    what it does for them, and what that brings. Lists by session, or by stage."""

    question: int
    # Why there is nothing to tell: the draft node names who does not answer.
    missing: str = ""
    # Users of whom enough is known; as in ``Rates``.
    sessions: tuple[SessionId, ...] = ()
    rounds: tuple[int, ...] = ()
    lows: tuple[float, ...] = ()
    means: tuple[float, ...] = ()
    highs: tuple[float, ...] = ()
    token_seconds: tuple[float, ...] = ()
    call_seconds: tuple[float, ...] = ()
    link_seconds: tuple[float, ...] = ()
    jitters: tuple[float, ...] = ()
    link_jitters: tuple[float, ...] = ()
    # A pass of each stage: at all, for each row, and its relative deviation.
    pass_seconds: tuple[float, ...] = ()
    row_seconds: tuple[float, ...] = ()
    pass_jitters: tuple[float, ...] = ()
    # Users of whom too little is known yet, and those put aside for being late.
    unknown: int = 0
    aside: int = 0
    # What is in use: "plan", or "greedy" batching because it is forecast to be as good, "dropped"
    # because plans brought less, "look" to see what it brings; empty: nothing is decided yet.
    used: str = ""
    # Counts the first stage's decisions; batches by user from 1, 0 where in none; drafts' lengths,
    # 0 where none was told.
    version: int = 0
    batches: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    # Of the plan's cycle, and tokens a second by the forecasts of the last decision.
    period: float = 0.0
    planned: float = 0.0
    greedy: float = 0.0
    # Tokens a second that the users are brought by what is in use, measured over so long.
    brought: float = 0.0
    measured: float = 0.0
    # What plans and greedy batching have brought as shares of the latter's forecasts, in rounds
    # of measuring.
    plan_share: float = 0.0
    plan_rounds: float = 0.0
    greedy_share: float = 0.0
    greedy_rounds: float = 0.0


Message = (
    Segment
    | Verdict
    | PruneIndices
    | Expand
    | Expanded
    | Withdraw
    | Hello
    | Welcome
    | Ready
    | Open
    | Floor
    | Close
    | Closed
    | Credit
    | PassTimes
    | Rates
    | Schedule
    | Heartbeat
    | Clock
    | Fault
    | Submit
    | Output
    | Finished
    | Cancel
    | Collect
    | Events
    | Inspect
    | Status
    | Consult
    | Consulted
)
