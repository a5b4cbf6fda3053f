"""Messages of a client: requests for text, the state of nodes, and their traces."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from .base import Depths, PromptLogprobs, TensorSpec, WireMessage, require
from .ids import Rank
from .limits import Count, Finite, LogProb, NonNegative, OptionalSeconds, Seconds, Token
from .links import Role
from .sampling import UNCONSTRAINED, Constraint


class Submit(WireMessage, array_like=True, frozen=True, tag="submit"):
    """Requests text from the draft node. A number out of its range (``sampling``) is the user's
    mistake, and gets an answer rather than a fault."""

    # Chosen by the client, unique on its link.
    request: int
    prompt: str
    max_new_tokens: int
    seed: int
    temperature: Finite
    top_k: int
    top_p: Finite
    min_p: Finite = 0.0
    # Node-level default where empty.
    policy: str = ""
    ignore_eos: bool = False
    # As in ``Open``.
    repetition_penalty: Finite = 1.0
    presence_penalty: Finite = 0.0
    frequency_penalty: Finite = 0.0
    # Texts that end the answer before the first of them, or with it.
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    # The prompt as tokens, taken as they are; or as a conversation, a JSON list of messages that
    # the target's chat template makes a prompt of. Then ``prompt`` is empty.
    prompt_ids: tuple[int, ...] = ()
    chat: str = ""
    # Every token of the answer comes with its log-probability, and with so many of the likeliest.
    log_probs: bool = False
    top_logprobs: int = 0
    # Refused where the context has no room for ``max_new_tokens`` behind the prompt; else they are
    # cut to what there is.
    must_fit: bool = False
    # Names of the sampling settings above that the user has left out: the target's own
    # recommendation takes their place, where it has one.
    unset: tuple[str, ...] = ()
    # Only requests of one tenant share prompt prefixes; those without one share among themselves.
    # An HTTP service derives it from the API key: it cannot be guessed without the key.
    tenant: str = ""
    # The client's name for the request: it stands in the draft node's log, nowhere else.
    id: Annotated[str, Meta(max_length=64)] = ""
    # As in ``Open``; the draft node adds the tokens that end an answer.
    constraint: Constraint = UNCONSTRAINED
    # Nothing is computed: the answer is the prompt's tokens and their text.
    prompt_only: bool = False
    # The beginning of the answer that the client has from a draft node which it has lost, with as
    # many characters of its text: the answer continues behind them.
    given: tuple[Token, ...] = ()
    given_text: Count = 0
    # The answer begins with the prompt's tokens (``Output.prompt_ids``), unless it continues behind
    # ``given``; with their log-probabilities and so many of the likeliest tokens in the place of
    # each, where ``prompt_logprobs`` is not -1.
    echo: bool = False
    prompt_logprobs: int = -1
    # ``Output.text_lengths`` are wanted, to tell the tokens of an answer's parts apart.
    text_lengths: bool = False
    # The answer stands between ``prompt``, if any, and this text, where the target's tokenizer has
    # tokens for that.
    suffix: str = ""
    # ``prompt`` is read without the tokens that the target's tokenizer begins and ends texts with.
    bare: bool = False
    # Outputs without tokens say how much of the prompt has been read (``Output.prompt_read``).
    progress: bool = False
    # Outputs without tokens bring what the target has computed of all tokens but the last, as in
    # ``Open.features``, to train a draft head on.
    features: Depths = ()


class Output(WireMessage, array_like=True, frozen=True, tag="output"):
    """New text for a client, as soon as it is certain.

    Tensor: with ``Submit.features``, features [n, F] of the positions from ``features_start`` on.
    """

    request: int
    token_ids: tuple[Token, ...]
    text: str
    # With ``Submit.log_probs``, of each of ``token_ids``, in nats, before any sampling setting; and
    # ``Submit.top_logprobs`` likeliest tokens with theirs, one token after the other.
    token_log_probs: tuple[LogProb, ...] = ()
    top_tokens: tuple[Token, ...] = ()
    top_token_log_probs: tuple[LogProb, ...] = ()
    # The bytes that those tokens mean, of ``token_ids`` and then of ``top_tokens``: a client has no
    # tokenizer.
    token_bytes: tuple[bytes, ...] = ()
    # With ``Submit.echo``, before any token of the answer: prompt tokens from ``prompt_start`` on;
    # the log-probabilities of all of them but the prompt's first, if requested; and the bytes that
    # they mean, then those of the likeliest tokens.
    prompt_start: Count = 0
    prompt_ids: tuple[Token, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
    prompt_bytes: tuple[bytes, ...] = ()
    # With ``Submit.text_lengths``, of each of ``token_ids`` the characters that it adds to the
    # text; what the text has beyond them was held back.
    text_lengths: tuple[Count, ...] = ()
    # With the first tokens: those of the prompt, and of these the ones in the prefix cache. 0: not
    # known.
    prompt_tokens: Count = 0
    shared_tokens: Count = 0
    # With ``Submit.progress``, before any token: those of the prompt that stages have, the ones
    # from the prefix cache included. The counts above come with it.
    prompt_read: Count = 0
    # Positions come again where the request goes on after a break.
    features_start: Count = 0

    def check_tensor(self, tensor: TensorSpec | None) -> None:
        if tensor is not None:
            require(len(tensor.shape) == 2, "features have a row per position")

    def check(self) -> None:
        tokens, top = len(self.token_log_probs), len(self.top_tokens)
        require(tokens in (0, len(self.token_ids)), "every token has a log-probability, or none")
        require(top == len(self.top_token_log_probs), "lists differ in length")
        require(not top or top % max(1, tokens) == 0, "every token has as many")
        require(len(self.token_bytes) == tokens + top, "every token is spelled, or none")
        lengths = len(self.text_lengths)
        require(lengths in (0, len(self.token_ids)), "every token has its length of text, or none")
        prompt, likeliest = len(self.prompt_ids), 0
        if (scores := self.prompt_logprobs) is not None:
            scores.check()
            scored = max(0, prompt - (self.prompt_start == 0))
            require(len(scores.log_probs) == scored, "every prompt token but the first is scored")
            likeliest = len(scores.top_tokens)
        require(len(self.prompt_bytes) == prompt + likeliest, "every prompt token is spelled")


BREAKS = "breaks"
"""In ``Finished.code``: the pipeline broke repeatedly while it read the request."""

DRAINING = "draining"
"""In ``Finished.code``: an operator has told the draft node to take no new requests."""

TOO_LARGE = "too_large"
"""In ``Finished.code``: the cluster's caches can never hold the request."""

NODE_FAILURES = ("busy", "internal", DRAINING)
"""Codes of requests that were not computed and whose user need not change them."""


class Finished(WireMessage, array_like=True, frozen=True, tag="finished"):
    """The end of a request: ``stop``, ``length``, ``cancelled`` or ``error``."""

    request: int
    reason: str
    # For "error": the sentence the user reads.
    detail: str
    # Counters, named and defined in docs/reference/metrics.md.
    stats: dict[str, Finite]
    # For "error": a short name scripts can test, e.g. "busy" or ``BREAKS``.
    code: str = ""
    # For "stop": the one of ``Submit.stop`` that ended the answer; empty: its own end.
    stop: str = ""


class Cancel(WireMessage, array_like=True, frozen=True, tag="cancel"):
    """A client no longer wants a request; its slots are freed everywhere."""

    request: Count


MAX_MASK_BYTES = 64
"""The longest key of BLAKE2b."""


class Collect(WireMessage, array_like=True, frozen=True, tag="collect"):
    """Requests a node's trace: a client from the draft node, which requests those of the stages."""

    # Chosen by the requesting side, repeated in the answers.
    collection: Count
    # From so many seconds ago on; -1: all there is.
    last: OptionalSeconds
    # Continue with events from now on; else end with those recorded.
    follow: bool
    # End a collection that follows.
    stop: bool = False
    # With token ids and texts of what all users ask and are told.
    tokens: bool = False
    # The draft node's key by which all nodes hide tokens, so that equal ones stay equal.
    mask: Annotated[str, Meta(max_length=MAX_MASK_BYTES)] = ""

    def check(self) -> None:
        require(len(self.mask.encode()) <= MAX_MASK_BYTES, "a mask has at most 64 bytes")


class Events(WireMessage, array_like=True, frozen=True, tag="events"):
    """Part of a node's trace. Tensor: whole lines of JSON in UTF-8, uint8 [n]."""

    collection: Count
    # The node that recorded the events; -1 with ``done``: the whole collection.
    rank: Rank
    # Nothing more comes.
    done: bool = False
    # Why a node has no trace, if so.
    reason: str = ""

    def check_tensor(self, tensor: TensorSpec | None) -> None:
        if tensor is not None:
            require(tensor.dtype == "uint8" and len(tensor.shape) == 1, "a trace is bytes")


class Inspect(WireMessage, array_like=True, frozen=True, tag="inspect"):
    """Requests the state of nodes: a client from the draft node, which requests that of the others
    and passes on their answers."""

    # Chosen by the requesting side, repeated in the answers.
    query: Count


class Status(WireMessage, array_like=True, frozen=True, tag="status"):
    """The state of a node."""

    query: Count
    rank: Rank
    role: Role
    layers: tuple[Count, Count]
    # Time in service, and of that the device's busy time: differences give busy shares.
    up_seconds: Seconds
    busy_seconds: Seconds
    # Resident memory of the process.
    memory_bytes: Count
    # Sessions here; requests (draft node) or segments (stage) that wait; cache slots in use.
    sessions: Count
    waiting: Count
    slots: Count
    # Its links: peers, round trips by heartbeats in seconds (upper bounds; -1: not known), bytes
    # written.
    peers: tuple[Rank, ...] = ()
    round_trips: tuple[OptionalSeconds, ...] = ()
    sent: tuple[Count, ...] = ()
    # The last answer to this query.
    last: bool = False
    # Draft node only: the model that it serves; tokens of prompt and answer together at most.
    model: str = ""
    context_length: Count = 0
    # Draft node: why no request can be served now; empty where one can. Stage: why the handshake
    # with the next one has failed; empty where it has not.
    missing: str = ""
    # All cache slots of a stage, 0: no bound; on the draft node those that admitted requests may
    # need.
    room: Count = 0
    # Draft node only: the sampling settings that its target recommends, as in ``Submit.unset``.
    defaults: dict[str, int | Finite] = field(default_factory=dict)
    # Sums since the node's start, by names of the sender's version: a reader takes those it knows.
    # Draft node: requests and their statistics; stage: passes, rows.
    totals: dict[str, NonNegative] = field(default_factory=dict)
    # Draft node only: by name the sum of some times in seconds, and how many fell into each bucket.
    distributions: dict[str, tuple[NonNegative, ...]] = field(default_factory=dict)
    # The name of its machine, and memory that is free there: what a placement may still use.
    host: str = ""
    free_bytes: Count = 0
    # Stage: rows, ascending, and seconds of such a pass, as measured so far.
    pass_rows: tuple[Seconds, ...] = ()
    pass_seconds: tuple[Seconds, ...] = ()
    # Draft node only: what drafts, and why where the node chose it, for people.
    draft: str = ""
    # Draft node only, of its chat template: how calls of tools are written, whether it takes tools,
    # how reasoning is marked, and which of its arguments switch that.
    tool_syntax: str = ""
    takes_tools: bool = False
    reasoning: str = ""
    template_options: tuple[str, ...] = ()
    # What computes, such as "cpu" or "cuda:0", and of memory of its own that is free, and that this
    # node holds; 0: it computes in its machine's. On the draft node of what drafts.
    device: str = ""
    device_free_bytes: Count = 0
    device_held_bytes: Count = 0
    # Stage: its link to the next one is down, and has not been refused.
    is_cut: bool = False

    def check(self) -> None:
        links = {len(self.peers), len(self.round_trips), len(self.sent)}
        require(len(links) == 1, "lists differ in length")
        require(len(self.pass_rows) == len(self.pass_seconds), "lists differ in length")


class Drain(WireMessage, array_like=True, frozen=True, tag="drain"):
    """An operator tells a draft node to finish its requests and take no new ones."""

    # Chosen by the requesting side, repeated in the answer.
    query: Count
    # False: it takes requests again.
    on: bool = True


class Drained(WireMessage, array_like=True, frozen=True, tag="drained"):
    """The answer to ``Drain``: no request is left, or new ones are taken again."""

    query: Count
    # Why it is not so; empty where it is.
    reason: str = ""


ClientMessage = (
    Submit | Output | Finished | Cancel | Collect | Events | Inspect | Status | Drain | Drained
)
