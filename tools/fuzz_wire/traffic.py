"""Valid frames of hostile peers: a draft node's sessions, a client's requests, and what stages and
a token source answer. Some are valid at another moment only."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping

from msgspec import Struct

from asyncspec_protocol.base import TensorSpec
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import (
    Cancel,
    Clock,
    Close,
    Closed,
    Collect,
    Credit,
    Expand,
    Expanded,
    Features,
    Floor,
    Heartbeat,
    Inspect,
    Message,
    Open,
    PassTimes,
    PlanStatusRequest,
    PruneIndices,
    Rates,
    Ready,
    Schedule,
    Segment,
    Submit,
    Verdict,
    Withdraw,
)
from asyncspec_protocol.sampling import Constraint
from tools.fuzz_wire.mutations import frame_of

Foreign = Callable[[], int]
"""The number of a session that is another's, and live."""

VOCAB = 96


class _Session:
    """What an honest draft node knows of a session that it makes up."""

    def __init__(self, name: int, prompt: int) -> None:
        self.name = name
        self.prompt = prompt
        self.tip = prompt - 1
        # The node that a new root follows, which is sent with the next segment; -1: there is none.
        self.parent = -1
        self.next_node = prompt
        self.version = 0
        self.segments = 0
        self.read = 0
        self.live: list[int] = []
        # Of a token source: what it has been told, and whether it owes an answer.
        self.committed = 0
        self.asked = False


class Drafter:
    """The messages of a draft node to a stage or a token source."""

    def __init__(self, rng: random.Random, first: int, foreign: Foreign) -> None:
        self._rng = rng
        self._next = first + rng.randrange(2**20)
        self._foreign = foreign
        self._sessions: list[_Session] = []
        # Segments that the stage allows in all.
        self._allowed = 0
        self._sent = 0

    def received(self, message: Message) -> None:
        """What the node says to it."""
        if isinstance(message, Credit):
            self._allowed = message.limit
        elif isinstance(message, Expanded):
            for session in self._sessions:
                session.asked &= session.name != message.session

    def to_later_stage(self) -> Message:
        """What a draft node says to a stage that gets segments from the one before."""
        if self._sessions and self._rng.random() < 0.95:
            return self._other(self._rng.choice(self._sessions))
        self._sessions.append(_Session(self._new(), 1))
        return self.to_stage() if self._rng.random() < 0.1 else Heartbeat(1.0, 0.0)

    def to_stage(self) -> Message:
        """The next message of its sessions to the first stage, most often one that follows."""
        rng = self._rng
        if not self._sessions or (len(self._sessions) < 4 and rng.random() < 0.15):
            return self._open()
        session = rng.choice(self._sessions)
        kind = rng.random()
        if kind < 0.55 and self._sent < self._allowed:
            self._sent += 1
            return self._segment(session)
        if kind < 0.75:
            return self._prune(session)
        return self._other(session)

    def to_source(self) -> Message:
        """Requests for drafts, most often ones that follow."""
        rng = self._rng
        if not self._sessions or (len(self._sessions) < 4 and rng.random() < 0.2):
            self._sessions.append(_Session(self._new(), 1))
        session = rng.choice(self._sessions)
        if rng.random() < 0.7 and (not session.asked or rng.random() < 0.03):
            session.asked = True
            tokens = tuple(rng.randrange(VOCAB) for _ in range(rng.choice((1, 1, 2, 9, 40))))
            base, session.committed = session.committed, session.committed + len(tokens)
            depth, width = rng.randint(0, 6), rng.randint(0, 8)
            count = rng.randint(0, 20)
            return Expand(session.name, session.version, base, tokens, depth, width, count)  # type: ignore[arg-type]
        if rng.random() < 0.02:
            return Features(session.name, session.committed, 0)  # type: ignore[arg-type]
        if rng.random() < 0.5:
            return Withdraw(session.name)  # type: ignore[arg-type]
        return self._other(session)

    def _new(self) -> int:
        self._next += self._rng.choice((1, 1, 1, 5))
        return self._next

    def _open(self) -> Message:
        rng, like = self._rng, -1
        prompt = rng.choice((1, 2, 3, 9, 40))
        shared = 0
        # Those that have read their prompts, or soon will have.
        older = [one for one in self._sessions if one.segments > one.prompt // 16 + 3]
        if older and rng.random() < 0.5:
            parent = rng.choice(older)
            shared, like = min(parent.prompt, prompt) - 1, parent.name
        session = _Session(self._new(), prompt)
        session.read = shared = max(0, shared)
        self._sessions.append(session)
        return Open(
            session.name,  # type: ignore[arg-type]
            prompt,
            prompt + rng.choice((0, 8, 200)),
            rng.randrange(2**32),
            rng.choice((0.0, 0.0, 0.8)),
            rng.choice((0, 0, 5)),
            1.0,
            presence_penalty=rng.choice((0.0, 0.0, 0.5))
            if rng.random() < 0.02 or not shared
            else 0.0,
            top_logprobs=rng.choice((0, 0, 3)),
            log_probs=rng.random() < 0.2,
            parent_session=like if shared else -1,  # type: ignore[arg-type]
            common_prefix=shared,
            coalesce=rng.random() < 0.5,
            max_tree_nodes=rng.choice((-1, 8, 200)),
        )

    def _segment(self, session: _Session) -> Message:
        rng = self._rng
        if session.read < session.prompt:
            ids = tuple(range(session.read, min(session.prompt, session.read + 16)))
            parents = tuple(n - 1 for n in ids)
            session.read += len(ids)
        else:
            above = [session.tip, *session.live[-12:]]
            ids = tuple(range(session.next_node, session.next_node + rng.randint(1, 6)))
            session.live += ids
            session.next_node += len(ids)
            parents = tuple(rng.choice(above) for _ in ids)
            if session.parent >= 0:
                ids, parents = (session.tip, *ids), (session.parent, *parents)
                session.parent = -1
        session.segments += 1
        tokens = tuple(rng.randrange(VOCAB) for _ in ids)
        return Segment(
            session.name,  # type: ignore[arg-type]
            session.segments - 1,  # type: ignore[arg-type]
            session.version,  # type: ignore[arg-type]
            ids,  # type: ignore[arg-type]
            parents,  # type: ignore[arg-type]
            tokens,
            waited=rng.random() < 0.1,
        )

    def _prune(self, session: _Session) -> Message:
        """A miss: the new root follows the tip, which has been sent."""
        if (session.parent >= 0 or session.read < session.prompt) and self._rng.random() < 0.99:
            return Heartbeat(1.0, 0.0)
        session.version += 1
        session.parent = session.tip
        root, session.next_node = session.next_node, session.next_node + 1
        session.tip, session.live = root, []
        return PruneIndices(session.name, session.version, session.next_node, (root,), ())  # type: ignore[arg-type]

    def _other(self, session: _Session) -> Message:
        rng, name = self._rng, session.name
        if rng.random() < 0.02:
            name = self._foreign()
        kind = rng.random()
        if kind < 0.15:
            self._sessions.remove(session)
            return Close(name, rng.random() < 0.3)  # type: ignore[arg-type]
        if kind < 0.2:
            self._sessions.clear()
            return Floor(rng.choice((name, self._next + 1)))  # type: ignore[arg-type]
        if kind < 0.9:
            return rng.choice((Heartbeat(rng.random(), rng.random()), Clock(1.0)))
        others: tuple[Message, ...] = (
            Rates(name, rng.randrange(9), rng.random(), 1e-3, 1e-3, 1e-3),  # type: ignore[arg-type]
            Credit(rng.randrange(99), rng.randrange(9)),
            Collect(rng.randrange(9), rng.choice((-1.0, 1.0)), rng.random() < 0.5),
            rng.choice((Inspect(3), PlanStatusRequest(4))),
        )
        return rng.choice(others)


_GRAMMARS = ('root ::= "a"', "[", '{"type":"object"}', "x" * 5000)


def from_client(rng: random.Random) -> Message:
    """A request of a client, or its end, or a question."""
    number, kind = rng.randrange(6), rng.random()
    if kind < 0.35:
        return Submit(
            rng.randrange(10**6),
            rng.choice(("hello", "x" * rng.randrange(200), "", "\x00\ud7ff")),
            rng.choices((1, 3, 20, 200), (8, 8, 3, 1))[0],  # most of the time is the frames'
            rng.randrange(2**31),
            rng.choice((0.0, 0.7)),
            rng.choice((0, 9)),
            1.0,
            policy=rng.choice(("", "flow", "chain", "autoregressive", "no such")),
            stop=rng.choice(((), ("a",), ("",))),
            log_probs=rng.random() < 0.2,
            top_logprobs=rng.choice((0, 0, 2)),
            chat=rng.choice(("", "", "", '[{"role":"user","content":"x"}]', "[", "{}")),
            prompt_ids=rng.choice(((), (), (1, 2, 3), (10**9,))),
            constraint=Constraint(rng.choice(("", "", "", *_GRAMMARS))),
            prompt_only=rng.random() < 0.1,
            tenant=rng.choice(("", "a")),
        )
    if kind < 0.6:
        return Cancel(number)
    others: tuple[Message, ...] = (
        Inspect(number),
        PlanStatusRequest(number),
        Collect(number, rng.choice((-1.0, 0.5)), rng.random() < 0.5, rng.random() < 0.5),
        Heartbeat(1.0, rng.random()),
        Clock(rng.random()),
    )
    if rng.random() < 0.02:
        return Drafter(rng, 0, lambda: 0).to_stage()
    return rng.choices(others, (1, 1, 1, 5, 5))[0]


class Answer(Struct, frozen=True):
    """A frame of a hostile node, and which of them sends it."""

    rank: int
    frame: bytes


class Pipeline:
    """What two hostile stages and a token source answer to a draft node."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.session = 0

    def greeting(self, rank: int) -> Iterator[Answer]:
        """The first frames of a node that is linked."""
        yield Answer(rank, frame_of(Ready(Rank(rank), True, self._rng.choice((0, 10**6)))))
        if rank == 1:
            yield Answer(1, frame_of(Credit(self._rng.choice((2, 64, 2**40)), 2)))

    def answers(self, rank: int, message: Message) -> Iterator[Answer]:
        """To one message of the draft node."""
        rng = self._rng
        match message:
            case Segment(session, segment, _, ids):
                self.session = session
                tokens = tuple(rng.randrange(VOCAB) for _ in ids)
                yield Answer(1, frame_of(Credit(2**20 + segment, 2)))
                yield Answer(2, frame_of(Verdict(session, segment, 0, ids, tokens)))  # type: ignore[arg-type]
            case Close(session):
                bytes_sent = rng.choice((0, 10, 2**53 - 1))
                closed = Closed(session, Rank(rank), 1, 2, 0, 0.1, bytes_sent)
                yield Answer(rank, frame_of(closed))
            case Expand(session, version, base, committed):
                grown: Mapping[str, tuple[float, ...]] = {}
                if message.count:
                    grown = {"parents": (-1,), "tokens": (5,), "scores": (-0.5,)}
                answer = Expanded(session, version, base + len(committed), **grown)  # type: ignore[arg-type]
                yield Answer(3, frame_of(answer))
            case _:
                return

    def unasked(self, rank: int) -> bytes:
        """Something that nobody waits for, or somebody at another moment."""
        rng, session = self._rng, self.session
        some: tuple[Message, ...] = (
            PassTimes(Rank(rank), (1.0, 16.0), (rng.choice((1e-12, 1e-3, 1e12)), 0.01)),
            Ready(Rank(rank), rng.random() < 0.7, rng.choice((0, 1, 10**6))),
            Credit(rng.choice((0, 5, 2**53 - 1)), rng.choice((0, 2**53 - 1))),
            Closed(session, Rank(rank), 1, 1, 0, 1e12, 2**53 - 1),  # type: ignore[arg-type]
            Schedule(session, 1, 0, 1, 4),  # type: ignore[arg-type]
            Verdict(session, rng.randrange(9), 0, (rng.randrange(60),), (1,)),  # type: ignore[arg-type]
            Expanded(session, 0, 5, (-1,), (1,), (-0.1,)),  # type: ignore[arg-type]
            Heartbeat(1e12, 1e12, 1e12),
        )
        return frame_of(rng.choice(some))


def hidden_states(rng: random.Random, message: Segment) -> tuple[bytes, TensorSpec]:
    """A tensor for a segment to a later stage, of the right shape most often."""
    width = rng.choice((1, 1, 1, 2))
    return rng.randbytes(8 * width * len(message.ids)), TensorSpec(
        "uint64", (len(message.ids), width)
    )
