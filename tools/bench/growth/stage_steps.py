"""A verify stage's machine at any point of a session, and what its next step costs."""

from __future__ import annotations

from msgspec import Struct

from asyncspec.core.jobs import Forward
from asyncspec.core.machine import Compute, Computed, Effect, Input, LinkUp, Received
from asyncspec_nodes.roles.verify.machine import VerifyMachine
from asyncspec_nodes.roles.verify.session import VerifyConfig, VerifyState
from asyncspec_protocol.ids import DRAFT, NodeId, Rank, SegmentId, SessionId, Version
from asyncspec_protocol.messages import Open, PruneIndices, Segment
from tools.bench.growth import trees
from tools.bench.growth.timing import Call

SESSION = SessionId(0)
ROWS = 16
PROMPT_ROWS = 512
NOTHING_SAID = 0


class StageSteps(Struct, frozen=True):
    """A pipeline's only stage whose session has ``committed`` nodes and ``live`` ones below."""

    machine: VerifyMachine
    state: VerifyState
    committed: int
    live: int

    def receive(self) -> Call:
        """A segment of ``ROWS`` leaves comes and becomes a pass."""
        return self._call(_segment(self.committed, range(self.live, self.live + ROWS)))

    def end_pass(self) -> Call:
        """That pass ends and becomes a verdict."""
        segment = _segment(self.committed, range(self.live, self.live + ROWS))
        state, effects = self.machine.step(self.state, segment, 0.0)
        after = StageSteps(self.machine, state, self.committed, self.live)
        return after._call(_done(effects))

    def prune(self) -> Call:
        """A prune accepts the first node and keeps what hangs from it: half of them."""
        return self._call(_prune(self.committed, self.live))

    def receive_pruned(self) -> Call:
        """A segment below that half: slots have moved, so lines are made again."""
        state, _ = self.machine.step(self.state, _prune(self.committed, self.live), 0.0)
        after = StageSteps(self.machine, state, self.committed, self.live)
        kept = trees.half(self.live)[-1]
        fresh = range(self.live, self.live + ROWS)
        return after._call(_segment(self.committed, fresh, below=kept))

    def _call(self, event: Input) -> Call:
        # States are values: the same step can be taken again and again.
        return lambda: self.machine.step(self.state, event, 0.0)


def stage_steps(committed: int, live: int) -> StageSteps:
    """A stage that has been sent so much of a prompt and of a tree, through ``step`` alone."""
    machine = VerifyMachine(VerifyConfig(Rank(1), 1))
    state, _ = machine.step(machine.initial(), LinkUp(DRAFT), 0.0)
    capacity = committed + 2 * live + 2 * ROWS
    opening = Open(SESSION, committed, capacity, 0, 0.0, 0, 1.0)
    state, _ = machine.step(state, Received(DRAFT, opening), 0.0)
    for start in range(0, committed, PROMPT_ROWS):
        state = _through(machine, state, _chunk(start, min(start + PROMPT_ROWS, committed)))
    for start in range(0, live, ROWS):
        nodes = range(start, min(start + ROWS, live))
        state = _through(machine, state, _segment(committed, nodes))
    return StageSteps(machine, state, committed, live)


def _through(machine: VerifyMachine, state: VerifyState, segment: Received) -> VerifyState:
    """A segment comes, and its pass ends."""
    state, effects = machine.step(state, segment, 0.0)
    return machine.step(state, _done(effects), 0.0)[0]


def _done(effects: tuple[Effect, ...]) -> Computed:
    jobs = [e.job for e in effects if isinstance(e, Compute) and isinstance(e.job, Forward)]
    return Computed(jobs[0], (NOTHING_SAID,) * len(jobs[0].sampled_rows))


def _chunk(start: int, end: int) -> Received:
    ids = tuple(NodeId(i) for i in range(start, end))
    return _received(ids, tuple(NodeId(i - 1) for i in ids))


def _segment(committed: int, nodes: range, below: int | None = None) -> Received:
    """Nodes of the tree; with ``below`` they are all children of that one."""
    parents = [trees.parent(node) if below is None else below for node in nodes]
    ids = tuple(NodeId(committed + node) for node in nodes)
    return _received(ids, tuple(NodeId(committed + above) for above in parents))


def _received(ids: tuple[NodeId, ...], parents: tuple[NodeId, ...]) -> Received:
    message = Segment(SESSION, SegmentId(ids[0]), Version(0), ids, parents, tokens=(1,) * len(ids))
    return Received(DRAFT, message)


def _prune(committed: int, live: int) -> Received:
    keep = tuple(NodeId(committed + node) for node in trees.half(live))
    horizon = NodeId(committed + live)
    message = PruneIndices(SESSION, Version(1), horizon, (NodeId(committed),), keep)
    return Received(DRAFT, message)
