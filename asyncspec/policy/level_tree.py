"""PipeDec and SpecPipe: the tree enters the pipeline level by level, one level a turn.

Both grow the tree from its leaves and keep each level to the same width: of all children of the
last level the best by cumulative probability (PipeDec 3.3.3, SpecPipe 3.3.3 "fixed-width tree").
They differ in their parameters and in the systems around them.
"""

from __future__ import annotations

from asyncspec.core.accept import TargetOutput
from asyncspec.core.tree import TokenTree, by_score
from asyncspec.policy.base import Count, Growth, Positive, Share, Usual, View
from asyncspec.policy.lossy import TOPS, Lossy, relaxed, within_top_p
from asyncspec.source.expand import Shape
from asyncspec_protocol.ids import NodeId


class Levels(Usual, frozen=True):
    """While a level is computed by one stage, the levels before it are at later ones, and the
    draft node grows the next. A hit costs one turn, a miss as many as there are stages.
    """

    # Most nodes of a level (PipeDec and SpecPipe: w).
    width: Positive = 32
    # Most children of a node (c).
    children: Positive = 16
    # Most levels below the root, which is the number of pipeline groups (PipeDec 3.1); 0: as many
    # as there are stages.
    depth: Count = 0
    # Levels that enter in one turn (SpecPipe 3.4, "more than one tree-level").
    levels: Positive = 1
    # Segments a level is cut into, so that the stages of one group work side by side (SpecPipe
    # 3.4, "mini-batch").
    parts: Positive = 1
    # What waits at a stage may share a pass. Ours, and then a turn may bring more than one level.
    coalesce: bool = False
    # Whether what is drafted below the prompt's last token follows the prompt. Ours.
    eager: bool = True
    # Which token to take (SpecPipe 3.4, "lossy acceleration"); p of "top-p".
    lossy: Lossy = ""
    top_p: Share = 0.9

    @property
    def narrows(self) -> bool:
        return True

    @property
    def top_logprobs(self) -> int:
        return TOPS if self.lossy else 0

    def choose(self, tree: TokenTree, node: NodeId, output: TargetOutput) -> int:
        if self.lossy == "relaxed":
            return relaxed(tree, node, output)
        if self.lossy == "top-p":
            return within_top_p(tree, node, output, self.top_p)
        return output.token

    def most_live(self, stages: int) -> int:
        """Every level is as wide as it may be, but for the first ones, which have not enough
        parents yet."""
        left, size, level = self._depth(stages), 0, min(self.children, self.width)
        while left and 1 < level < self.width:
            left, size, level = left - 1, size + level, min(level * self.children, self.width)
        return size + left * level

    def grow(self, view: View) -> Growth | None:
        room = min(self._depth(view.stages), view.room) - view.levels
        if view.drafted or room <= 0:
            return None
        levels, width = min(self.levels, room), self._width(view)
        shape = Shape(levels, self.children, levels * width, width, fixed_width=True)
        return Growth(shape, adopt=shape.count, frontier=view.deepest)

    def cut(self, view: View) -> tuple[NodeId, ...]:
        if view.fresh_root or not view.drafted:
            return view.fresh_root  # alone, while its children are drafted
        nodes = view.tree.nodes
        end = min(nodes[n].position for n in view.drafted) + self.levels
        level = (n for n in view.drafted if nodes[n].position < end)
        part = -(-self.levels * self._width(view) // self.parts)
        return by_score(view.tree, level)[:part]

    def _depth(self, stages: int) -> int:
        """Levels below the root at most."""
        return self.depth or stages * self.levels

    def _width(self, view: View) -> int:
        """Of a level, where its segments are to have so many rows at most."""
        return max(1, min(self.width, view.rows * self.parts // self.levels))
