"""The draft node's machine with a tree of any size, and what its next step costs."""

from __future__ import annotations

from collections.abc import Sequence

from asyncspec.core.machine import (
    Compute,
    Computed,
    Input,
    LinkUp,
    Received,
    Request,
    Send,
    Submitted,
)
from asyncspec.core.sampling import Sampling
from asyncspec.policy.flowspec import FlowSpec
from asyncspec_nodes.roles.draft.machine import DraftMachine
from asyncspec_nodes.roles.draft.session import DraftConfig, DraftSession, DraftState
from asyncspec_protocol.ids import NodeId, Rank, Version
from asyncspec_protocol.messages import Credit, Expand, Expanded, Ready, Segment, Verdict
from tools.bench.growth import trees
from tools.bench.growth.stage_steps import ROWS
from tools.bench.growth.timing import Call

FIRST = Rank(1)
PROMPT = (1,) * ROWS
NEW_TOKENS = 4096
NO_CHILD = 1_000_000
"""A token that no node carries."""


class DraftSteps:
    """``flowspec`` with a first tree of ``live`` nodes, on a pipeline of one stage."""

    def __init__(self, live: int) -> None:
        policy = FlowSpec(l_init=live, l_seg=ROWS, d_init=live)
        self.machine = DraftMachine(DraftConfig(stages=1, policies={"flowspec": policy}))
        self._state = self.machine.initial()
        self._live = live
        self._credit = 0
        # What the source was asked last, and the last segment.
        self._asked: list[Expand] = []
        self._sent: list[Segment] = []
        self._feed(LinkUp(FIRST))
        self._feed(Received(FIRST, Ready(FIRST, True)))
        self._feed(self._grant(1))
        sampling = Sampling()
        self._feed(Submitted(Request(0, PROMPT, NEW_TOKENS, sampling, frozenset(), "flowspec")))
        prompt = self._asked[-1]
        self._feed(Computed(prompt, _answer(prompt, 0)))
        last = self._sent[-1]
        self._feed(Received(FIRST, _verdict(last, last.ids[-1:], (NO_CHILD,))))
        self._merge = Computed(self._asked[-1], _answer(self._asked[-1], live))
        self._before_merge = self._state
        self._feed(self._merge)

    def merge(self) -> Call:
        """A drafted tree of so many nodes comes and is adopted."""
        return self._call(self._before_merge, self._merge)

    def cut(self) -> Call:
        """There is credit for one segment, to be cut from a tree nobody was sent of."""
        return self._call(self._state, Received(FIRST, Credit(self._credit + 1)))

    def verdict(self) -> Call:
        """The target takes the first node of a tree that was sent whole: half of it stays. The
        verdict speaks of ``ROWS`` nodes, the others being the youngest."""
        while self._session().unsent:
            self._feed(self._grant(1))
        tree = self._session().tree
        nodes = list(tree.nodes)
        ids = (tree.root, *nodes[1 - ROWS :])
        tokens = (tree.nodes[nodes[1]].token, *(NO_CHILD,) * (ROWS - 1))
        return self._call(self._state, Received(FIRST, _verdict(self._sent[-1], ids, tokens)))

    def _session(self) -> DraftSession:
        (session,) = self._state.sessions.values()
        return session

    def _grant(self, segments: int) -> Received:
        self._credit += segments
        return Received(FIRST, Credit(self._credit))

    def _feed(self, event: Input) -> None:
        self._state, effects = self.machine.step(self._state, event, 0.0)
        self._asked += [
            e.job for e in effects if isinstance(e, Compute) and isinstance(e.job, Expand)
        ]
        self._sent += [
            e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Segment)
        ]

    def _call(self, state: DraftState, event: Input) -> Call:
        # States are values: the same step can be taken again and again.
        return lambda: self.machine.step(state, event, 0.0)


def _answer(job: Expand, count: int) -> Expanded:
    """A binary tree (``trees``) in which every node has its own token, the left child the better
    score."""
    scores: list[float] = []
    for node in range(count):
        above = trees.parent(node)
        scores.append((scores[above] if above != trees.TIP else 0.0) - (0.5 + 0.5 * (node % 2)))
    return Expanded(
        session=job.session,
        version=job.version,
        base=job.base + len(job.committed),
        parents=tuple(map(trees.parent, range(count))),
        tokens=tuple(range(1, count + 1)),
        scores=tuple(scores),
    )


def _verdict(segment: Segment, ids: Sequence[NodeId], tokens: Sequence[int]) -> Verdict:
    return Verdict(segment.session, segment.segment, Version(0), tuple(ids), tuple(tokens))
