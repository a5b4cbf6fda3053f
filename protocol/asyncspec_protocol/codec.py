"""One message to bytes and back. What types cannot say is checked here, before anybody uses it."""

from __future__ import annotations

import math
from itertools import chain
from operator import lt

import msgspec

from .errors import RemoteProtocolError
from .limits import (
    ITEM_BYTES,
    MAX_CANDIDATES,
    MAX_CAPACITY,
    MAX_COBATCHED,
    MAX_COUNT,
    MAX_DIMENSIONS,
    MAX_FEATURES,
    MAX_NODES,
    MAX_REPETITION_PENALTY,
    MAX_SECONDS,
    MAX_TENSOR_BYTES,
    MAX_TOKEN,
    MAX_TOP_LOGPROBS,
    MAX_TREE_NODES,
    MIN_REPETITION_PENALTY,
    MIN_SECONDS,
)
from .messages import (
    FINAL,
    Closed,
    Credit,
    Events,
    Expand,
    Expanded,
    Finished,
    Heartbeat,
    Message,
    Open,
    Output,
    PassTimes,
    PlanStatus,
    PruneIndices,
    Rates,
    Ready,
    Schedule,
    Segment,
    Status,
    Submit,
    Verdict,
)


class TensorSpec(msgspec.Struct, array_like=True, frozen=True):
    """What the raw bytes behind a header mean: C order, little endian."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Length of the raw bytes."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


class Header(msgspec.Struct, array_like=True, frozen=True):
    """The first part of a frame."""

    message: Message
    tensor: TensorSpec | None = None


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Header] = msgspec.msgpack.Decoder(Header)


def encode(message: Message, tensor: TensorSpec | None = None) -> bytes:
    """The header bytes of a frame."""
    return _ENCODER.encode(Header(message, tensor))


def decode(data: bytes | bytearray | memoryview) -> Header:
    """A checked header. Raises ``RemoteProtocolError`` for anything else."""
    try:
        header = _DECODER.decode(data)
    # msgspec's own, text that is no UTF-8, and lists in lists in lists.
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"undecodable frame: {error}") from error
    _check_message(header.message)
    if header.tensor is not None:
        _check_tensor(header.message, header.tensor)
    elif isinstance(header.message, Verdict):
        _require(not header.message.feature_ids, "featured nodes have their features in a tensor")
    return header


def _check_message(message: Message) -> None:
    match message:
        case Segment():
            _check_segment(message)
        case Verdict(_, _, applied, ids, tokens, featured, likely, log_probs, drawn, more, spent):
            _check_seconds(spent)
            _require(0 <= more < MAX_COBATCHED, "a pass has at most 4096 verdicts")
            _require(len(tokens) == len(ids) <= MAX_NODES, "a verdict has one token per node")
            _check_counts(applied, message.pass_number, *ids, *tokens, *featured)
            _require(len(set(featured)) == len(featured) <= MAX_NODES, "a node is featured once")
            _require(max((*tokens, *likely), default=0) <= MAX_TOKEN, "a token is out of bounds")
            _check_likely(len(ids), likely, log_probs)
            _require(len(drawn) in (0, len(ids)), "every token has a log-probability, or none")
            _check_log_probs(drawn)
        case PruneIndices(_, version, horizon, accepted, keep):
            _require(len(accepted) + len(keep) <= 4 * MAX_NODES, "a prune names too many nodes")
            _check_counts(version, horizon, *accepted, *keep)
        case Expand(_, _, base, committed, depth, width, count, beam) as job:
            _check_counts(base, depth, width, count, beam, *committed, *job.widths)
            _require(max((depth, width, count, beam, *job.widths)) <= MAX_NODES, "a tree is small")
            _require(len(job.widths) in (0, depth), "every level has its width, or none")
            _check_tree(job.parents, job.tokens, job.scores)
            _require(all(-1 <= n < len(job.parents) for n in job.frontier), "a frontier is known")
            _require(len(job.frontier) <= MAX_TREE_NODES, "a frontier is small")
            grown = depth * max(beam or width, len(job.frontier)) * max(width, *job.widths, 0)
            _require(grown <= MAX_CANDIDATES, "a tree has at most 2^20 candidates")
        case Expanded(_, _, _, parents, tokens, scores, seconds):
            _check_tree(parents, tokens, scores)
            _check_seconds(seconds)
        case Open(session, length, capacity, _, temperature, top_k, top_p, min_p) as opened:
            _require(session >= 0 and 0 < length <= capacity, "a session holds its prompt")
            _require(capacity <= MAX_CAPACITY, "a session has at most 2^31 tokens")
            _require(math.isfinite(temperature) and temperature >= 0, "temperature is 0 or more")
            _require(top_k >= 0 and 0 < top_p <= 1 and 0 <= min_p <= 1, "a share is in 0..1")
            _check_penalties(opened)
            _require(
                0 <= opened.resumed_tokens < length, "what was given comes after the user's prompt"
            )
            _require(0 <= opened.common_prefix < length, "a prompt's last token is never shared")
            older = (
                0 <= opened.parent_session < session
                if opened.common_prefix
                else opened.parent_session == -1
            )
            _require(older, "a session begins like an older one, or like none")
            features = opened.features
            ascend = list(features) == sorted(set(features)) and min(features, default=0) >= 0
            _require(ascend or features == (FINAL,), "features are ascending depths, or -1 alone")
            _require(len(features) <= MAX_FEATURES, "a row has at most 64 features")
            _require(
                -1 <= opened.max_tree_nodes <= MAX_TREE_NODES,
                "a tree has 0 to 8192 nodes, or -1: not said",
            )
            _require(
                0 <= opened.top_logprobs <= MAX_TOP_LOGPROBS,
                "a verdict has at most 256 likeliest tokens",
            )
        case PassTimes(_, rows, seconds, row_seconds, jitter):
            _require(0 < len(rows) == len(seconds) <= 32, "every number of rows has its seconds")
            _require(min(rows) >= 1 and max(rows) <= MAX_COUNT, "a pass has a row at least")
            _require(all(map(lt, rows, rows[1:])), "rows ascend")
            _check_seconds(*seconds, row_seconds, jitter)
            some = all(time >= MIN_SECONDS for time in (*seconds, row_seconds) if time)
            _require(some, "a time is 0, or a picosecond at least")
        case Rates(_, rounds, alpha, token, call, link, jitter, mean, high, link_jitter):
            _check_counts(rounds)
            _require(all(0 <= chance <= 1 for chance in (alpha, mean, high)), "a chance is in 0..1")
            _check_seconds(token, call, link, jitter, link_jitter)
        case Schedule(_, version, batch, batches, length):
            _check_counts(version, batch, batches)
            _require(batch < max(1, batches), "a batch is one of all")
            _require(0 < length <= MAX_NODES, "a draft has a token at least")
        case Heartbeat(sent, echo, byte_seconds):
            _check_seconds(sent, echo, byte_seconds)
        case Closed(_, rank, passes, rows, dead_rows, seconds, sent):
            _check_counts(rank, passes, rows, dead_rows, sent)
            _check_seconds(seconds)
        case Credit(limit, room, row_seconds):
            _check_counts(limit, room)
            _check_seconds(row_seconds)
        case Ready(rank, _, slots):
            _check_counts(rank, slots)
            _require(max(message.opened, message.floor) <= MAX_COUNT, "a number is too large")
            _require(min(message.opened, message.floor) >= -1, "numbers are finite, and >= -1")
        case PlanStatus():
            _check_plan_status(message)
        case Status(peers=peers, round_trips=round_trips, sent=written) as status:
            _require(len(peers) == len(round_trips) == len(written), "lists differ in length")
            own = (status.up_seconds, status.busy_seconds, *round_trips)
            said = status.defaults.values()
            _require(all(map(math.isfinite, said)), "numbers are finite")
            _require(all(abs(time) <= MAX_SECONDS for time in own), "a time is no time")
            held = (status.memory_bytes, status.sessions, status.waiting, status.slots)
            _check_counts(*held, status.room, status.context_length, *written)
        case Output(_, tokens, _, log_probs, likely, likely_log_probs, spelled):
            wanted = len(tokens) if log_probs else 0
            _require(len(log_probs) == wanted, "every token has a log-probability, or none")
            _require(len(likely) == len(likely_log_probs), "lists differ in length")
            _require(not likely or len(likely) % max(1, wanted) == 0, "every token has as many")
            _require(len(spelled) == wanted + len(likely), "every token is spelled, or none")
            _require(all(map(math.isfinite, (*log_probs, *likely_log_probs))), "numbers are finite")
        case Finished(stats=stats):
            _require(all(map(math.isfinite, stats.values())), "numbers are finite")
        case Submit():
            # What is out of range is the user's mistake, and gets an answer rather than a fault.
            values = (v for v in msgspec.structs.astuple(message) if isinstance(v, int | float))
            _require(all(map(math.isfinite, values)), "numbers are finite")
        case _:
            for value in msgspec.structs.astuple(message):
                if isinstance(value, int | float):
                    fine = -1 <= value <= (MAX_COUNT if isinstance(value, int) else MAX_SECONDS)
                    _require(fine, "numbers are finite, and >= -1")


def _check_segment(segment: Segment) -> None:
    """As ``_require`` would, without a call for each rule: this is on every segment's way."""
    ids, parents, tokens = segment.ids, segment.parents, segment.tokens
    if not 0 < len(ids) <= MAX_NODES:
        rule = "a segment has 1 to 4096 nodes"
    elif len(parents) != len(ids):
        rule = "every node of a segment has a parent"
    elif tokens and len(tokens) != len(ids):
        rule = "every node of a segment has a token, or none"
    elif len(set(ids)) != len(ids):
        rule = "a node stands once in a segment"
    elif min(parents) < -1 or not all(map(lt, parents, ids)):
        rule = "a parent is older than its child"
    elif segment.applied < 0 or segment.pass_number < 0 or (tokens and min(tokens) < 0):
        rule = "numbers do not go below 0"
    elif max(segment.segment, segment.applied, segment.pass_number, *ids) > MAX_COUNT:
        rule = "a number is too large"
    elif not 0 <= segment.taps <= MAX_FEATURES:
        rule = "a row has at most 64 features"
    elif tokens and max(tokens) > MAX_TOKEN:
        rule = "a token is out of bounds"
    elif not 0 <= segment.batch_remaining < MAX_COBATCHED:
        rule = "a pass has at most 4096 segments"
    elif not 0 <= segment.stage_seconds <= MAX_SECONDS:
        rule = "time does not go back"
    else:
        return
    raise RemoteProtocolError(rule)


def _check_tree(
    parents: tuple[int, ...], tokens: tuple[int, ...], scores: tuple[float, ...]
) -> None:
    _require(len(parents) == len(tokens) == len(scores), "lists differ in length")
    _require(all(-1 <= p < i for i, p in enumerate(parents)), "a parent comes first")
    _require(len(tokens) <= MAX_TREE_NODES, "a tree has at most 8192 nodes")
    _require(min(tokens, default=0) >= 0, "numbers do not go below 0")
    _require(max(tokens, default=0) <= MAX_TOKEN, "a token is out of bounds")
    _check_log_probs(scores)


def _check_likely(nodes: int, likely: tuple[int, ...], log_probs: tuple[float, ...]) -> None:
    _require(
        len(likely) == len(log_probs) <= nodes * MAX_TOP_LOGPROBS, "a node has 256 likeliest tokens"
    )
    _require(not likely or len(likely) % nodes == 0, "every node has as many likeliest tokens")
    _require(min(likely, default=0) >= 0, "numbers do not go below 0")
    _check_log_probs(log_probs)


def _check_counts(*numbers: int) -> None:
    _require(min(numbers) >= 0, "numbers do not go below 0")
    _require(max(numbers) <= MAX_COUNT, "a number is too large")


def _check_seconds(*times: float) -> None:
    fine = all(0 <= time <= MAX_SECONDS for time in times)
    _require(fine, "time does not go back, and is finite")


def _check_log_probs(values: tuple[float, ...]) -> None:
    _require(all(-math.inf < p <= 0 for p in values), "a log-probability is finite, and 0 or less")


def _check_penalties(opened: Open) -> None:
    low, high = MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
    fine = low <= opened.repetition_penalty <= high
    _require(fine, f"a repetition penalty is from {low:g} to {high:g}")
    for penalty in (opened.presence_penalty, opened.frequency_penalty):
        _require(-2 <= penalty <= 2, "a presence or frequency penalty is in -2..2")


def _check_plan_status(told: PlanStatus) -> None:
    chances = (told.lows, told.means, told.highs)
    times = (told.token_seconds, told.call_seconds, told.link_seconds)
    by_user = (told.rounds, *chances, *times, told.jitters, told.link_jitters)
    users, stages = len(told.sessions), len(told.pass_seconds)
    _require(all(len(row) == users for row in by_user), "lists differ in length")
    _require({len(told.batches), len(told.lengths)} == {users}, "lists differ in length")
    by_stage = (told.row_seconds, told.pass_jitters)
    _require(all(len(row) == stages for row in by_stage), "lists differ in length")
    _require(all(0 <= p <= 1 for row in chances for p in row), "a chance is in 0..1")
    rows = (*by_user, *by_stage, told.pass_seconds, told.batches, told.lengths)
    one = (v for v in msgspec.structs.astuple(told) if isinstance(v, int | float))
    _require(all(0 <= n < math.inf for n in (*one, *chain(*rows))), "numbers are finite, and >= 0")
    _require(max(told.lengths, default=0) <= MAX_NODES, "a draft is small")


def _check_tensor(message: Message, tensor: TensorSpec) -> None:
    shape = tensor.shape
    if tensor.dtype not in ITEM_BYTES:
        raise RemoteProtocolError(f"unknown dtype {tensor.dtype!r}")
    _require(0 < len(shape) <= MAX_DIMENSIONS, "a tensor has 1 to 4 dimensions")
    _require(min(shape) > 0, "a tensor is not empty")
    _require(tensor.nbytes <= MAX_TENSOR_BYTES, "the tensor is too large")
    match message:
        case Segment(ids=ids, taps=taps):
            _require(shape[0] == len(ids), "a segment's tensor has a row per node")
            widths = (1 + taps,) if taps else ()
            _require(shape[1:-1] == widths, "a segment's tensor has its taps beside each row")
        case Verdict(feature_ids=featured):
            rows = shape[0] if len(shape) == 2 else 0
            _require(0 < rows == len(featured), "a verdict's tensor has a row per feature")
        case Events():
            _require(tensor.dtype == "uint8" and len(shape) == 1, "a trace is bytes")
        case _:
            raise RemoteProtocolError("messages of this kind do not carry a tensor")


def _require(fact: bool, rule: str) -> None:
    if not fact:
        raise RemoteProtocolError(rule)
