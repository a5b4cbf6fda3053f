"""Flow: best-first speculation by expected tokens a second (docs/reference/policies.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from asyncspec.core.tree import Shape
from asyncspec.policy.base import Committed, Count, Drafted, Growth, Policy, Positive, View
from asyncspec.policy.flow.measured import Contention, LevelCost
from asyncspec.policy.flow.memory import FlowMemory
from asyncspec.policy.flow.parameters import FLOW_PARAMETERS
from asyncspec.policy.flow.rounds import RoundCosts
from asyncspec_protocol.ids import NodeId


def describe(stats: Mapping[str, float]) -> str:
    """What ``flow`` did in a request and why, by its statistics; empty: another policy ran."""
    if "segment_rows" not in stats:
        return ""
    rows, later = int(stats["segment_rows"]), int(stats["segment_levels"])
    speed, levels = stats["speed_rate"], later or int(stats["root_levels"])
    shape = f"chains of {rows}" if rows <= levels else f"trees of {rows} rows"
    shape += "" if later else ", one a round"
    slow = f", speculation has {speed:.2f} of its expected speed" if speed < 0.9 else ""
    return (
        f"the draft's first choice is right {stats['first_choice_rate']:.0%} of the time, a row "
        f"costs {stats['row_cost_rate']:.2f} of a pass{slow}: {shape if rows else 'no speculation'}"
    )


class Flow(Policy, frozen=True):
    """Sends the likeliest nodes first, in segments whose rows and levels promise the most committed
    tokens a second; none where that is no speculation. Chains, levels, a tree a round and plain
    decoding are shapes it finds, not modes."""

    # Children of a node that the token source is asked for.
    children: Positive = 8
    # Nodes of a session's tree at most; 0: 128 a stage, at least 512.
    nodes: Count = 0

    @property
    def coalesce(self) -> bool:
        return True

    @property
    def plans_rows(self) -> bool:
        return True

    @property
    def speculate_during_prefill(self) -> bool:
        return True

    def max_tree_nodes(self, stages: int) -> int:
        """Segments that fill a long pipeline are many: where none fits into the tree, stages wait
        for the verdicts that make room."""
        filling = FLOW_PARAMETERS.tree_nodes_a_stage * stages
        return self.nodes or max(FLOW_PARAMETERS.min_tree_nodes, filling)

    def learn(self, memory: object, event: Drafted | Committed) -> FlowMemory:
        current = _flow_memory(memory)
        if isinstance(event, Drafted):
            current = replace(current, level=_level_cost(current.level, event))
        else:
            current = current.committing(event)
        if current.level is None or not event.costs.times:
            return current
        sessions = max(1, event.sessions) if isinstance(event, Committed) else current.sessions
        change = abs(sessions - current.sessions) / max(sessions, current.sessions)
        if current.committed < current.due and change < FLOW_PARAMETERS.min_sessions_change:
            return current
        contention = current.contention or Contention(processors=event.costs.processors)
        if current.tokens:
            contention = contention.observe(
                event.costs.contention, current.rate.busy, current.tokens
            )
        costs = RoundCosts.of(event.costs, current.level, sessions, contention)
        return replace(current, contention=contention).choosing(costs)

    def carried(self, memory: object, latest: object) -> FlowMemory:
        """Nodes and plain decoding cost the same whatever is sampled; how often drafts are right,
        and how fast rounds are for that, is learned anew."""
        current, newest = _flow_memory(memory), _flow_memory(latest)
        return replace(
            current, level=newest.level, contention=newest.contention, plain=newest.plain
        )

    def stats(self, memory: object) -> Mapping[str, float]:
        current = _flow_memory(memory)
        if not current.plain_rate:
            return {}
        stats = {
            "first_choice_rate": current.acceptance.profile[0],
            "row_cost_rate": current.row_share,
            "root_levels": current.shape.first,
            "segment_levels": current.shape.levels,
            "segment_rows": current.shape.rows,
            "speed_rate": current.speculating_now.mean(1.0),
        }
        if current.plain.doubt < 0.5:
            # While drafts keep the draft node busy, round trips say too little of plain decoding.
            stats["plain_tokens_per_second"] = current.plain.tokens / current.plain.time
        return stats

    def grow(self, view: View) -> Growth | None:
        if not view.levels_left:
            return None
        current = _flow_memory(view.memory)
        shape = current.shape
        position = view.tree.nodes[view.tree.root].position
        if not shape.rows and position % current.probe_interval:
            return None
        if len(view.tree) == 1:
            # Also where nothing will be sent.
            return self._growth(view, shape.first or shape.levels or 1, shape.rows)
        if not shape.rows:
            return None
        if not shape.levels:
            # Another tree where a round's first node was drafted in an earlier one.
            new = view.tokens_since_draft and view.fresh_root
            return self._growth(view, shape.first, shape.rows) if new else None
        if view.tokens_since_draft and current.draft_is_free:
            # There is time to look for what competes below the new tip: fewer of its candidates
            # were kept when it was one node of many.
            return self._growth(view, shape.levels, shape.rows)
        chances = _worthwhile(view, current)
        # A lookup's copy fills the levels at once: where nothing is left to send, the stages and
        # this node, if it drafts for no other session, would stand idle until its verdicts.
        idle = current.sessions == 1 and chances.keys().isdisjoint(view.drafted)
        if not (idle or _may_deepen(view, current)):
            return None
        children = _to_grow(view, current, chances)
        if not children:
            return None
        frontier = tuple(children)[: shape.rows]
        known_children = sum([children[node] for node in frontier])
        return self._growth(view, shape.levels, shape.rows, frontier, known_children)

    def _growth(
        self,
        view: View,
        levels: int,
        rows: int,
        frontier: tuple[NodeId, ...] = (),
        known_children: int = 0,
    ) -> Growth:
        """As many nodes as a segment takes, and some siblings of the likeliest ones."""
        depth = min(levels, view.levels_left)
        count = rows + 4 * depth + known_children
        shape = Shape(depth, self.children, count, beam=max(1, rows))
        return Growth(shape, count, frontier, calibrated=True)

    def next_segment(self, view: View) -> tuple[NodeId, ...]:
        current = _flow_memory(view.memory)
        shape, root = current.shape, view.fresh_root
        if not shape.rows or not view.levels_left:
            return root
        if root and not shape.first:
            return root
        if root and len(view.tree) == 1 and not view.no_growth:
            # With its first levels, unless nobody knows how long they take.
            return root if current.level is None else ()
        if not shape.levels and (view.tokens_since_draft if root else view.segments):
            return ()
        if not root and view.segments_in_flight >= current.rate.segments:
            return ()
        unsent = frozenset(view.drafted)
        if not unsent:
            return root  # asked after most verdicts: the chances of a whole tree cost more
        chances = _worthwhile(view, current)
        chosen = [node for node in chances if node in unsent][: min(shape.rows, view.max_rows)]
        if not root and _better_later(view, current, chances, chosen):
            return ()
        return (*root, *chosen)


def _level_cost(level: LevelCost | None, event: Drafted) -> LevelCost:
    """After a draft. Where all are too late for their rounds all are abandoned, and the first one
    says what a level takes at most."""
    if event.abandoned:
        return level or LevelCost(event.rows, event.level_seconds)
    seconds, call = event.level_seconds, event.call_seconds
    return (level or LevelCost()).observe(seconds, event.rows, event.sessions, call)


def _flow_memory(memory: object) -> FlowMemory:
    return memory if isinstance(memory, FlowMemory) else FlowMemory()


def _worthwhile(view: View, memory: FlowMemory) -> dict[NodeId, float]:
    """The nodes below the root that are worth a row and their chances, the likeliest first, parents
    before their children."""
    chances = memory.acceptance.chances(view.tree, memory.least_chance)
    del chances[view.tree.root]
    nodes = sorted(chances, key=lambda node: (-chances[node], node))
    return {node: chances[node] for node in nodes}


def _may_deepen(view: View, memory: FlowMemory) -> bool:
    """Whether levels are left that can be sent before a verdict comes."""
    return view.levels < min(memory.rate.depth, view.levels_left)


def _likeliest_leaf(view: View, worthwhile: Mapping[NodeId, float]) -> NodeId | None:
    """The first node without children."""
    parents = {data.parent for data in view.tree.nodes.values()}
    return next((node for node in worthwhile if node not in parents), None)


def _to_grow(view: View, memory: FlowMemory, chances: Mapping[NodeId, float]) -> dict[NodeId, int]:
    """Nodes to grow below and how many children they have, those first where the path most likely
    goes on with what was not drafted: leaves, and nodes of a lookup's copy that the model was not
    asked about. None at which the answer ends."""
    last = view.tree.nodes[view.tree.root].position + view.levels_left
    left, children = dict(chances), dict.fromkeys(chances, 0)
    for node, data in view.tree.nodes.items():
        if data.parent in left:
            children[data.parent] += 1
            left[data.parent] -= chances.get(node, 0.0)
    nodes = [
        node
        for node, count in children.items()
        if view.tree.nodes[node].position < last
        and (not count or (node in view.unasked and left[node] > memory.least_chance))
    ]
    nodes.sort(key=lambda node: (-left[node], node))
    return {node: children[node] for node in nodes}


def _better_later(
    view: View, memory: FlowMemory, worthwhile: Mapping[NodeId, float], chosen: Sequence[NodeId]
) -> bool:
    """Whether a segment costs more tokens than it brings: it delays the one with the children of
    the likeliest leaf, which are being drafted."""
    if view.no_growth or not _may_deepen(view, memory):
        return False
    leaf = _likeliest_leaf(view, worthwhile)
    if leaf is None:
        return False
    rate = memory.rate
    delay = max(0.0, rate.period - memory.draft_seconds)
    lost = rate.tokens_per_second * delay * worthwhile[leaf]
    return sum([worthwhile[node] for node in chosen]) < lost


FLOW = Flow()
