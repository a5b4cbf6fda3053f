"""A draft node that drafts nothing, as a machine: texts in, what each stage makes of them out.

Every text is a session whose tokens are all prompt. It asks for the hidden states at each stage's
end and for the log-probability of every token, one segment after the other.

Messages stand for ``Received`` of them as events, and for ``Send`` of them as effects:

| event | handler | effects |
| --- | --- | --- |
| LinkUp Ready Credit | _begin | Open Segment |
| Verdict | _verdict | Segment Close Open Finish |
| LinkDown | | Finish |
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.machine import Effects, Finish, Input, LinkDown, LinkUp, Received, Send
from asyncspec.core.tensors import WireTensor
from asyncspec_protocol.ids import NodeId, Rank, SegmentId, SessionId, Version
from asyncspec_protocol.messages import (
    Close,
    Credit,
    Open,
    Ready,
    Segment,
    Verdict,
)

FIRST = Rank(1)
CHUNK = 64
"""Rows of a segment."""

SPARE_SLOTS = 64
"""Slots of a stage's share that a text leaves free: they are counted in blocks."""


class StageProbeConfig(Struct, frozen=True):
    """What is asked of which stages."""

    stages: int
    texts: tuple[tuple[int, ...], ...]
    # Layers before each stage's end, as in ``Open.features``.
    depths: tuple[int, ...]
    # Ids from here on.
    first_session: SessionId
    # Bytes of hidden states after which the rest of the texts is left out.
    max_bytes: int = 2**26


class ProbedChunk(Struct, frozen=True):
    """What the stages made of a segment: the states at their ends side by side [n, stages * H],
    and the log-probabilities of the tokens behind its own."""

    text: int
    tokens: tuple[int, ...]
    next_tokens: tuple[int, ...]
    states: WireTensor
    log_probs: tuple[float, ...]


class StageStates(Struct, frozen=True):
    """What the stages of a cluster made of some texts."""

    # Layers before each stage's end.
    depths: tuple[int, ...] = ()
    chunks: tuple[ProbedChunk, ...] = ()
    # Host and port of each stage.
    addresses: tuple[tuple[str, int], ...] = ()
    # They compute on this machine.
    same_machine: bool = False
    # Why there is nothing.
    error: str = ""


NOT_PROBED = StageStates()


class StageProbeState(Struct, frozen=True):
    """State of a probe."""

    config: StageProbeConfig
    # What each linked stage last reported.
    ready: Mapping[Rank, Ready] = {}
    linked: frozenset[Rank] = frozenset()
    credit: int = 0
    # Segments sent on the link.
    segments: int = 0
    # The text that is read; its tokens, as many as the stages have slots for; those sent.
    text: int = -1
    tokens: tuple[int, ...] = ()
    sent: int = 0
    chunks: tuple[ProbedChunk, ...] = ()
    received_bytes: int = 0
    over: bool = False

    @property
    def session(self) -> SessionId:
        """That of the text that is read."""
        return SessionId(self.config.first_session + self.text)


class StageProbe:
    """The machine. Handles to tensors are these as they came."""

    def __init__(self, config: StageProbeConfig) -> None:
        self.config = config

    def initial(self) -> StageProbeState:
        """A probe without peers."""
        return StageProbeState(self.config)

    def step(
        self, state: StageProbeState, event: Input, now: float
    ) -> tuple[StageProbeState, Effects]:
        """Handle one input; what comes after the end changes nothing."""
        if state.over:
            return state, ()
        match event:
            case LinkUp(peer):
                state = replace(state, linked=state.linked | {peer})
            case LinkDown(peer, reason):
                return _over(state, f"stage {peer}: {reason}")
            case Received(peer, Ready() as message):
                state = replace(state, ready={**state.ready, peer: message})
            case Received(peer, Credit(limit)) if peer == FIRST:
                state = replace(state, credit=limit)
            case Received(_, Verdict() as message, WireTensor() as states) if (
                message.session == state.session
            ):
                return _verdict(state, message, states)
            case _:
                return state, ()
        return _begin(state)


def _begin(state: StageProbeState) -> tuple[StageProbeState, Effects]:
    """Open the first text once the pipeline is complete; send what waits for credit."""
    stages = range(1, state.config.stages + 1)
    if not all(Rank(r) in state.linked and Rank(r) in state.ready for r in stages):
        return state, ()
    if state.text < 0:
        if not all(report.up for report in state.ready.values()):
            return state, ()
        return _next_text(state)
    waiting = state.segments == len(state.chunks)
    return _next_segment(state) if waiting else (state, ())


def _next_text(state: StageProbeState) -> tuple[StageProbeState, Effects]:
    config = state.config
    full = state.received_bytes >= config.max_bytes
    if full or state.text + 1 == len(config.texts):
        return _over(state)
    slots = [report.slots for report in state.ready.values() if report.slots]
    tokens = config.texts[state.text + 1]
    if slots:
        tokens = tokens[: max(1, min(slots) - SPARE_SLOTS)]
    state = replace(state, text=state.text + 1, tokens=tokens, sent=0)
    length = len(tokens)
    opening = Open(
        session=state.session,
        prompt_length=length,
        capacity=length + 1,
        seed=0,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        features=config.depths,
        max_tree_nodes=1,
        prompt_logprobs=0,
    )
    state, effects = _next_segment(state)
    return state, (Send(FIRST, opening), *effects)


def _next_segment(state: StageProbeState) -> tuple[StageProbeState, Effects]:
    if state.segments >= state.credit:
        return state, ()
    tokens, start = state.tokens, state.sent
    end = min(start + CHUNK, len(tokens))
    ids = range(start, end)
    message = Segment(
        session=state.session,
        segment=SegmentId(start // CHUNK),
        applied=Version(0),
        ids=tuple(map(NodeId, ids)),
        parents=tuple(NodeId(node - 1) for node in ids),
        tokens=tokens[start:end],
        scored_tokens=tokens[start + 1 : end + 1],
    )
    state = replace(state, segments=state.segments + 1, sent=end)
    return state, (Send(FIRST, message),)


def _verdict(
    state: StageProbeState, message: Verdict, states: WireTensor
) -> tuple[StageProbeState, Effects]:
    tokens, end = state.tokens, state.sent
    start = end - (end % CHUNK or CHUNK)
    scores = message.prompt_logprobs
    chunk = ProbedChunk(
        state.text,
        tokens[start:end],
        tokens[start + 1 : end + 1],
        states,
        () if scores is None else scores.log_probs,
    )
    size = state.received_bytes + states.data.nbytes
    state = replace(state, chunks=(*state.chunks, chunk), received_bytes=size)
    if end < len(tokens) and size < state.config.max_bytes:
        return _next_segment(state)
    stages = range(1, state.config.stages + 1)
    closes = tuple(Send(Rank(rank), Close(state.session)) for rank in stages)
    state, effects = _next_text(state)
    return state, (*closes, *effects)


def _over(state: StageProbeState, why: str = "") -> tuple[StageProbeState, Effects]:
    reason = "error" if why else "stop"
    return replace(state, over=True), (Finish(request=0, reason=reason, detail=why),)
