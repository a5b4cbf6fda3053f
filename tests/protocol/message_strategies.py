"""Messages to draw: every member of the union, built from its fields' types."""

from __future__ import annotations

import types
import typing
from typing import Annotated, Any

from hypothesis import strategies as st
from msgspec import Meta
from msgspec.structs import replace

from asyncspec_protocol.base import TensorSpec
from asyncspec_protocol.messages import (
    FINAL,
    Collect,
    Events,
    Expand,
    Expanded,
    Features,
    Message,
    Open,
    Output,
    PassTimes,
    PlanStatus,
    PromptLogprobs,
    PruneIndices,
    Ready,
    Schedule,
    Segment,
    Status,
    Verdict,
)
from asyncspec_protocol.sampling import Constraint

KINDS: tuple[type[Any], ...] = typing.get_args(Message)
count = st.integers(0, 2**31 - 1)
nodes = st.integers(0, 5000)
seconds = st.floats(0, 1e3)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    ids = draw(st.lists(nodes, min_size=1, max_size=8, unique=True))
    parents = tuple(draw(st.integers(-1, n - 1)) for n in ids)
    tokens = tuple(draw(count) for _ in ids) if draw(st.booleans()) else ()
    aux_states = draw(st.integers(0, 3))
    names = (draw(count), draw(count), draw(count))
    scored = tuple(draw(st.lists(count, max_size=len(ids))))
    return Segment(
        *(*names, tuple(ids), parents, tokens, aux_states),
        stage_seconds=draw(seconds),
        scored_tokens=scored,
    )


@st.composite
def prompt_scores(draw: st.DrawFn, size: int) -> PromptLogprobs:
    per_token = draw(st.integers(0, 3))
    log_probs = tuple(draw(st.floats(-50, 0)) for _ in range(size * (1 + per_token)))
    ranks = tuple(draw(st.integers(1, 99)) for _ in range(size))
    likely = tuple(draw(count) for _ in range(size * per_token))
    return PromptLogprobs(log_probs[:size], ranks, likely, log_probs[size:])


@st.composite
def verdicts(draw: st.DrawFn) -> Verdict:
    pairs = draw(st.lists(st.tuples(nodes, count), max_size=8))
    ids, tokens = tuple(n for n, _ in pairs), tuple(t for _, t in pairs)
    names = (draw(count), draw(count), draw(count))
    scores = draw(st.none() | prompt_scores(draw(st.integers(1, 4))))
    return Verdict(*names, ids, tokens, stage_seconds=draw(seconds), prompt_logprobs=scores)


@st.composite
def expansions(draw: st.DrawFn) -> Expanded:
    size = draw(st.integers(0, 8))
    parents = tuple(draw(st.integers(-1, i - 1)) for i in range(size))
    tokens = tuple(draw(count) for _ in range(size))
    scores = tuple(draw(st.floats(-50, 0)) for _ in range(size))
    return Expanded(draw(count), draw(count), draw(count), parents, tokens, scores)


@st.composite
def expand_jobs(draw: st.DrawFn) -> Expand:
    known = draw(expansions())
    size = len(known.tokens)
    small = st.integers(0, 40)
    depth = draw(small)
    widths = draw(st.lists(small, min_size=depth, max_size=depth)) if depth < 5 else []
    return Expand(
        draw(count),
        draw(count),
        draw(count),
        tuple(draw(st.lists(count, max_size=5))),
        depth,
        draw(small),
        draw(small),
        draw(small),
        draw(st.booleans()),
        tuple(widths),
        known.parents,
        known.tokens,
        known.scores,
        tuple(draw(st.lists(st.integers(-1, size - 1), max_size=4))),
        draw(st.text(max_size=5)),
        draw(count),
        calibrated=draw(st.booleans()),
    )


depths = st.builds(
    lambda layers, end: (*sorted(layers), *end),
    st.lists(st.integers(0, 80), max_size=4, unique=True),
    st.sampled_from([(), (FINAL,)]),
)


def constraints() -> st.SearchStrategy[Constraint]:
    biases = st.lists(st.tuples(count, st.floats(-100, 100)), max_size=3).map(tuple)
    some = st.lists(count, max_size=3).map(tuple)
    return st.builds(Constraint, st.text(max_size=12), biases, st.integers(0, 2**31 - 1), some)


def openings() -> st.SearchStrategy[Open]:
    return of_kind(
        Open,
        session=count,
        prompt_length=st.integers(1, 99),
        capacity=st.integers(99, 2**31),
        seed=st.integers(0, 2**64 - 1),
        resumed_tokens=st.just(0),
        parent_session=st.just(-1),
        common_prefix=st.just(0),
        features=depths,
    )


@st.composite
def prompts(draw: st.DrawFn) -> Output:
    """The beginning of an answer with ``Submit.echo``."""
    ids = tuple(draw(st.lists(count, min_size=1, max_size=4)))
    start = draw(st.integers(0, 9))
    scores = draw(st.none() | prompt_scores(len(ids) - (start == 0)))
    spelled = len(ids) + (0 if scores is None else len(scores.top_tokens))
    names = tuple(draw(st.binary(max_size=4)) for _ in range(spelled))
    said: dict[str, Any] = {"prompt_logprobs": scores, "prompt_bytes": names}
    return Output(draw(count), (), "", prompt_start=start, prompt_ids=ids, **said)


@st.composite
def outputs(draw: st.DrawFn) -> Output:
    if draw(st.booleans()):
        return draw(prompts())
    tokens = tuple(draw(st.lists(count, max_size=4)))
    text = draw(st.text(max_size=12))
    if not draw(st.booleans()):
        return Output(draw(count), tokens, text)
    per_node = draw(st.integers(0, 3))
    likely = tuple(draw(count) for _ in range(per_node * len(tokens)))
    log_probs = tuple(draw(st.floats(-50, 0)) for _ in (*tokens, *likely))
    spelled = tuple(draw(st.binary(max_size=4)) for _ in log_probs)
    split = len(tokens)
    return Output(draw(count), tokens, text, log_probs[:split], likely, log_probs[split:], spelled)


@st.composite
def statuses(draw: st.DrawFn) -> Status:
    links = draw(st.lists(st.tuples(count, st.floats(-1, 9), count), max_size=4))
    peers, round_trips, sent = zip(*links, strict=True) if links else ((), (), ())
    fixed: dict[str, Any] = {"peers": peers, "round_trips": round_trips, "sent": sent}
    seconds = tuple(draw(st.lists(st.floats(0, 9), max_size=4)))
    fixed |= {"pass_rows": seconds, "pass_seconds": seconds}
    status: Status = draw(
        of_kind(Status, **{name: st.just(value) for name, value in fixed.items()})
    )
    return status


@st.composite
def times(draw: st.DrawFn) -> PassTimes:
    rows = sorted(draw(st.sets(st.floats(1, 4096), min_size=1, max_size=8)))
    some = st.one_of(st.just(0.0), st.floats(1e-12, 9))
    seconds = [draw(some) for _ in rows]
    line, jitter, contention = draw(some), draw(st.floats(0, 9)), draw(st.floats(1, 9))
    return PassTimes(draw(count), tuple(rows), tuple(seconds), line, jitter, contention)


@st.composite
def plan_status(draw: st.DrawFn) -> PlanStatus:
    users, stages = draw(st.integers(0, 4)), draw(st.integers(0, 3))

    def column(values: st.SearchStrategy[Any], size: int) -> Any:
        return tuple(draw(st.lists(values, min_size=size, max_size=size)))

    chances, times = st.floats(0, 1), st.floats(0, 9)
    fields: list[Any] = [
        draw(count),
        draw(st.text(max_size=9)),
        *(column(count, users) for _ in range(2)),
        *(column(chances, users) for _ in range(3)),
        *(column(times, users) for _ in range(5)),
        *(column(times, stages) for _ in range(3)),
        *(draw(count), draw(count)),
        draw(st.sampled_from(("", "plan", "greedy", "dropped", "look"))),
        draw(count),
        *(column(st.integers(0, 20), users) for _ in range(2)),
        *(draw(times) for _ in range(9)),
        draw(count),
    ]
    return PlanStatus(*fields)


def plain(annotation: Any) -> st.SearchStrategy[Any]:
    """A strategy for a field's type, within its bounds."""
    annotation = getattr(annotation, "__supertype__", annotation)
    meta = Meta()
    if typing.get_origin(annotation) is Annotated:
        annotation, meta = typing.get_args(annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*map(plain, arguments))
    if origin is tuple and arguments[-1] is Ellipsis:
        sizes = {"min_size": meta.min_length or 0, "max_size": 6}
        return st.lists(plain(arguments[0]), **sizes).map(tuple)
    if origin is tuple:
        return st.tuples(*map(plain, arguments))
    if origin is dict:
        return st.dictionaries(plain(arguments[0]), plain(arguments[1]), max_size=3)
    if annotation is float:
        least, above = meta.ge if meta.gt is None else meta.gt, meta.gt is not None
        most, below = meta.le if meta.lt is None else meta.lt, meta.lt is not None
        return st.floats(least, most, exclude_min=above, exclude_max=below, allow_nan=False)
    if annotation is Constraint:
        return constraints()
    most = meta.le if meta.lt is None else meta.lt - 1
    return {
        int: st.integers(-1 if meta.ge is None else meta.ge, 2**31 - 1 if most is None else most),
        str: st.text(max_size=12),
        bool: st.booleans(),
        bytes: st.binary(min_size=meta.min_length or 0, max_size=meta.max_length or 6),
    }[annotation]


def of_kind(kind: type[Any], **special: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Any message of one type; ``special``: its fields with rules that types do not express."""
    if not special and kind in SPECIAL:
        return SPECIAL[kind]
    hints = typing.get_type_hints(kind, include_extras=True)
    drawn = {name: plain(hint) for name, hint in hints.items() if name not in special}
    return st.builds(kind, **drawn, **special)


SPECIAL: dict[type[Any], st.SearchStrategy[Any]] = {
    Segment: segments(),
    Verdict: verdicts(),
    PassTimes: times(),
    PlanStatus: plan_status(),
    PruneIndices: of_kind(
        PruneIndices,
        horizon=nodes,
        accepted=st.lists(nodes, max_size=6).map(tuple),
        keep=st.lists(nodes, max_size=6).map(tuple),
    ),
    Schedule: st.tuples(st.integers(1, 9), st.integers(0, 8)).map(
        lambda drawn: Schedule(7, 1, drawn[1] % drawn[0], drawn[0], 1 + drawn[1])
    ),
    Expand: expand_jobs(),
    Expanded: expansions(),
    # As all features, without its tensor.
    Features: of_kind(Features, count=st.just(0)),
    Open: openings(),
    Collect: of_kind(
        Collect, mask=st.text(max_size=64).filter(lambda mask: len(mask.encode()) <= 64)
    ),
    Ready: of_kind(Ready, features=depths),
    Output: outputs(),
    Status: statuses(),
}


messages: st.SearchStrategy[Any] = st.one_of(*map(of_kind, KINDS))


@st.composite
def frames(
    draw: st.DrawFn, drawn: st.SearchStrategy[Any] = messages
) -> tuple[Any, TensorSpec | None, memoryview | None]:
    """A message, with hidden states where it may carry some and features where it must."""
    message = draw(drawn)
    shape: tuple[int, ...]
    if isinstance(message, Verdict) and draw(st.booleans()):
        featured = tuple(draw(st.lists(nodes, min_size=1, max_size=8, unique=True)))
        message, shape = replace(message, feature_ids=featured), (len(featured), 3)
    elif isinstance(message, Features):
        message, shape = replace(message, count=2), (2, 3)
    elif isinstance(message, Segment) and draw(st.booleans()):
        shape = (len(message.ids), *([1 + message.aux_states] if message.aux_states else []), 3)
    elif isinstance(message, Output) and draw(st.booleans()):
        shape = (2, 3)
    elif isinstance(message, Events) and draw(st.booleans()):
        text = draw(st.binary(min_size=1, max_size=20))
        return message, TensorSpec("uint8", (len(text),)), memoryview(text)
    else:
        return message, None, None
    spec = TensorSpec(draw(st.sampled_from(["float32", "bfloat16"])), shape)
    return message, spec, memoryview(draw(st.binary(min_size=spec.nbytes, max_size=spec.nbytes)))


tensor_frames = frames(st.one_of(*map(of_kind, (Segment, Verdict, Features, Events)))).filter(
    lambda item: item[2] is not None
)
