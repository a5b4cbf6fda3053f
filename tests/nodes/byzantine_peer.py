"""A peer that sends every message the types allow, and a node that runs the resulting jobs."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.jobs import Job
from asyncspec.core.machine import Abandon, Compute, Computed, Effect, Input, LinkUp, Received, Send
from asyncspec.core.tensors import WireTensor
from asyncspec_nodes.roles.verify.config import VerifyConfig
from asyncspec_nodes.roles.verify.machine import VerifyMachine
from asyncspec_protocol.base import TensorSpec
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.framing import decode, encode, write_frame
from asyncspec_protocol.ids import DRAFT, Rank
from asyncspec_protocol.messages import (
    FINAL,
    Close,
    Closed,
    Credit,
    Fault,
    Floor,
    Message,
    Open,
    PassTimes,
    PruneIndices,
    Rates,
    Segment,
)
from asyncspec_protocol.sampling import UNCONSTRAINED, Constraint
from nodes.machine_driver import Driven

M = TypeVar("M", bound=Struct)

PREFIX_BYTES = 8
"""Of a frame, before its header."""


class Node:
    """A machine and its device, as the runtime has them: jobs run in their order, an abandoned one
    comes back with whatever there is, and what is sent must be fit to be received."""

    def __init__(self, driven: Driven, device: Any) -> None:
        self.driven = driven
        self.device = device
        self.jobs: deque[Job] = deque()
        self.abandoned: list[Job] = []
        self.refused: list[RemoteProtocolError] = []
        # What was told to whom.
        self.faults: list[tuple[Rank, Fault]] = []

    def receive(self, peer: int, message: Message, wire: WireTensor | None = None) -> None:
        """A message comes over a link, or is refused there."""
        spec = None if wire is None else TensorSpec(wire.dtype, wire.shape)
        try:
            received = decode(encode(message, spec)).message
            handle = None if wire is None else self._unpacked(wire)
            self.feed(Received(Rank(peer), received, handle))
        except RemoteProtocolError as error:
            self.refused.append(error)

    def feed_rows(self, peer: int, message: Segment) -> None:
        """A segment of a toy pipeline, with its rows where no tokens come."""
        count = len(message.ids)
        wire = WireTensor("uint64", (count, 1), memoryview(bytes(8 * count)))
        self.receive(peer, message, None if message.tokens else wire)

    def _unpacked(self, wire: WireTensor) -> object:
        try:
            return self.device.unpack(wire)
        except ValueError as error:
            raise RemoteProtocolError(str(error)) from error

    def feed(self, event: Input) -> None:
        """An input, and what comes of it. Whatever it raises, the state stays as it was."""
        before = self.driven.state
        try:
            effects = self.driven.feed(event)
        except RemoteProtocolError:
            assert self.driven.state is before
            raise
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Compute):
            self.jobs.append(effect.job)
        elif isinstance(effect, Abandon):
            self.abandoned.append(effect.job)
            self.device.abandon(effect.job)
        elif isinstance(effect, Send):
            if isinstance(effect.message, Fault):
                self.faults.append((effect.to, effect.message))
            wire = None if effect.tensor is None else self.device.pack(effect.tensor)
            spec = None if wire is None else TensorSpec(wire.dtype, wire.shape)
            header, *_ = write_frame(effect.message, spec, None if wire is None else wire.data)
            decode(header[PREFIX_BYTES:])

    def work(self) -> None:
        """The device does its next job, if there is one."""
        if not self.jobs:
            return
        job = self.jobs.popleft()
        result = self.device.run(job)
        if any(job is given_up for given_up in self.abandoned):
            # A real one stops between two layers, and has nothing then.
            result = None if result is None else ()
        if result is not None:
            try:
                self.feed(Computed(job, result, 0.5))
            except RemoteProtocolError as error:  # pragma: no cover
                pytest.fail(f"a result is no peer's fault: {error}")

    def rest(self) -> None:
        """The device does all there is to do."""
        while self.jobs:
            self.work()


def connected_stage(
    rank: int, stages: int, vocab: int, device: Any, each: int = 1, *, shares_prefixes: bool = True
) -> Node:
    """A stage of ``each`` layers whose peers are there."""
    first, end = each * (rank - 1), each * rank
    config = VerifyConfig(
        Rank(rank),
        stages,
        8,
        vocab,
        first_layer=first,
        end_layer=end,
        layers=each * stages,
        shares_prefixes=shares_prefixes,
    )
    node = Node(Driven(VerifyMachine(config)), device)
    peers = {DRAFT, Rank(rank - 1)} | ({Rank(rank + 1)} if rank < stages else set())
    for peer in sorted(peers):
        node.feed(LinkUp(peer))
    if rank < stages:
        node.receive(rank + 1, Credit(1000))
    return node


few = st.integers(0, 3)
ids = st.integers(0, 12)
several = st.lists(ids, max_size=5).map(tuple)
shares = st.floats(0, 1)
wanted = st.sampled_from([(), (), (), (FINAL,), (0,), (1,), (0, 1), (1, 2), (2,)])
# Some of tokens that no vocabulary has.
constraints = st.sampled_from(
    [
        *[UNCONSTRAINED] * 4,
        Constraint(logit_bias=((1, 2.0), (15, -100.0))),
        Constraint(logit_bias=((16, 1.0),)),
        Constraint(logit_bias=((1, 1.0), (2**31 - 1, 1.0))),
        Constraint(min_tokens=3, stop_tokens=(1, 2**31 - 1)),
    ]
)
# The edges of what types can say, and of what makes sense.
EXTREMES: dict[type, list[Any]] = {
    bool: [False, True],
    int: [0, 1, -1, 256, 4096, 2**31 - 1, 2**31, 2**53, 2**63, 2**64 - 1, -(2**63)],
    float: [0.0, -0.0, -1.0, -2.0, 5e-324, 1e-5, 1e6, 1e12, 1e308, -1e308, math.inf, math.nan],
    tuple: [(), (0,), (1, 0), (2**64 - 1,), (-1,), (5, 9), (math.nan,), (1e308, 1e309)],
}


@st.composite
def mutated(draw: st.DrawFn, sane: st.SearchStrategy[M]) -> M:
    """A message, one time in three with a field at the edge."""
    message = draw(sane)
    if draw(st.integers(0, 2)):
        return message
    fields = {name: getattr(message, name) for name in message.__struct_fields__}
    name = draw(st.sampled_from(sorted(n for n, v in fields.items() if type(v) in EXTREMES)))
    value: Any = draw(st.sampled_from(EXTREMES[type(fields[name])]))
    return replace(message, **{name: value})


@st.composite
def openings(draw: st.DrawFn, session: int) -> Open:
    """A session, most often one that may begin like an earlier one."""
    like = draw(st.sampled_from([-1, session - 1, session - 2, 0]))
    shared = draw(st.integers(1, 3)) if like >= 0 else 0
    length = draw(st.integers(1 + shared, 5))
    return Open(
        session,  # type: ignore[arg-type]
        length,
        length + draw(st.sampled_from([0, 2, 20])),
        draw(few),
        draw(st.sampled_from([0.0, 0.0, 1.0])),
        draw(few),
        draw(st.sampled_from([1.0, 0.5])),
        draw(st.sampled_from([0.0, 0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.0, 2.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.0, 0.5])),
        resumed_tokens=draw(st.integers(0, length - 1)),
        features=draw(wanted),
        top_logprobs=draw(st.sampled_from([0, 0, 5])),
        log_probs=draw(st.booleans()),
        parent_session=like,  # type: ignore[arg-type]
        common_prefix=shared,
        coalesce=draw(st.booleans()),
        max_tree_nodes=draw(st.sampled_from([-1, -1, 3, 8])),
        constraint=draw(constraints),
    )


@st.composite
def segments(draw: st.DrawFn, state: Any, session: int, vocab: int) -> Segment:
    """Nodes, most often such that follow what is here."""
    known = state.sessions.get(session)
    here: list[int] = [-1]
    travels, depths = False, 0
    if known is not None:
        here = [known.slots.tip, *known.slots.speculative]
        here += [n for w in state.queue if w.session == session for n in w.ids]
        travels, depths = known.tokens_travel, known.aux_states(state.config.first_layer)
    if draw(st.integers(0, 5)):
        start, count = max(here) + 1, draw(st.integers(1, 4))
        nodes = list(range(start, start + count))
        line = draw(st.booleans())
        parents = [here[-1] if line else draw(st.sampled_from(here))]
        parents += [n - 1 if line else draw(st.sampled_from([*here, *nodes])) for n in nodes[1:]]
        parents = [min(p, n - 1) for p, n in zip(parents, nodes, strict=True)]
    else:
        nodes = draw(st.lists(ids, min_size=1, max_size=4, unique=True))
        parents = [draw(st.integers(-1, n - 1)) for n in nodes]
    first = state.config.rank == 1
    tokens = tuple(draw(st.integers(0, vocab - 1)) for _ in nodes)
    return Segment(
        session,  # type: ignore[arg-type]
        draw(few),  # type: ignore[arg-type]
        draw(few),  # type: ignore[arg-type]
        tuple(nodes),  # type: ignore[arg-type]
        tuple(parents),  # type: ignore[arg-type]
        tokens if first or travels else (),
        aux_states=depths,
        batch_remaining=draw(st.sampled_from([0, 0, 0, 0, 0, 1])),
        stage_seconds=draw(st.sampled_from([0.0, 1.0])),
        pass_number=draw(few),
    )


@functools.cache
def other_messages(session: int) -> st.SearchStrategy[Any]:
    """Anything else that a draft node can say of a session."""
    name = st.just(session)
    prunes = st.builds(PruneIndices, name, st.integers(1, 9), ids, several, several)
    seconds = st.tuples(shares, shares)
    return st.one_of(
        prunes,
        prunes,
        prunes,
        st.builds(Close, name, st.booleans()),
        st.builds(Close, name, st.booleans()),
        st.builds(Floor, name),
        st.builds(Rates, name, few, *[shares] * 8),
        st.builds(PassTimes, few, st.just((1.0, 8.0)), seconds, shares, shares),
        st.builds(Credit, st.integers(1000, 2000), few, shares),
        st.builds(Closed, name, few, few, few, few, shares, few),
    )


Tensors = Callable[[Any, Segment], WireTensor | None]


def send_arbitrary_messages(node: Node, data: st.DataObject, vocab: int, tensors: Tensors) -> None:
    """A byzantine draft node and, behind the first stage, a byzantine previous stage."""
    config = node.driven.machine.config
    before, newest = int(config.rank) - 1, 0
    node.receive(before, data.draw(openings(0)))
    for what in data.draw(st.lists(st.sampled_from("ossssssdddddaac"), max_size=40)):
        session = data.draw(st.integers(max(0, newest - 2), newest))
        if what == "o":
            newest += 1
            node.receive(before, data.draw(mutated(openings(newest))))
        elif what == "s":
            message = data.draw(mutated(segments(node.driven.state, session, vocab)))
            node.receive(before, message, tensors(data.draw, message))
        elif what == "a":
            node.receive(0, data.draw(mutated(other_messages(session))))
        elif what == "c" and not config.last:
            node.receive(config.next_rank, data.draw(mutated(st.builds(Credit, few, few, shares))))
        else:
            node.work()
    node.rest()
