"""The token tree of one session, and what it grows from and into.

A tree is a value: every operation returns a new tree and leaves its inputs unchanged. Nodes are
named by node id and never by their place in an array, so that prune, verdict and segment commute
(docs/reference/protocol.md).

The root is the tip of the committed path, with the draft tree below it. A node's score is its
cumulative log-probability from the root by the draft (FlowSpec eq. 1). No child scores above its
parent, which makes descending score order a topological order (FlowSpec III-B).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from msgspec import Struct

from asyncspec_protocol.ids import NO_PARENT, NodeId

TIP = -1
"""Stands for the tip where a candidate is named by its index."""

Grown = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]
"""Parents (index into the same list, or ``TIP``), tokens and cumulative scores."""


class Shape(Struct, frozen=True):
    """Size and shape of the tree to grow below each node of a frontier."""

    # Levels.
    depth: int
    # Children per node; ``widths`` says it level by level.
    width: int
    # Most nodes in all, the best ones.
    count: int
    # Nodes of a level that are expanded further; 0: as many as ``width`` (EAGLE-2).
    beam: int = 0
    # Only the beam of a level stays (PipeDec, SpecPipe); else all children stay candidates.
    fixed_width: bool = False
    # Children per node of every level, where they differ (SpecInfer's fixed shapes).
    widths: tuple[int, ...] = ()

    def children(self, level: int) -> int:
        """Children per node of a level, counted from 0."""
        return self.widths[level] if self.widths else self.width


class Start(Struct, frozen=True):
    """Where a tree grows from: the part of it that is there, and the nodes in it to expand."""

    part: Grown = ((), (), ())
    # Indices into ``part``, or ``TIP``.
    frontier: tuple[int, ...] = (TIP,)
    # Nodes of ``part`` compete with the new ones for their places.
    compete: bool = False


FROM_TIP = Start()


class TreeNode(Struct, frozen=True, gc=False):
    """One token of the tree."""

    parent: NodeId
    token: int
    # Distance from the start of the prompt: the RoPE position.
    position: int
    # Cumulative log-probability below the root, in nats; 0 at the root.
    score: float


class TokenTree(Struct, frozen=True):
    """Live nodes by id, in order of issue: every parent before its children, the root first."""

    root: NodeId
    nodes: Mapping[NodeId, TreeNode]
    # (parent, token) -> child: no two siblings have the same token.
    index: Mapping[tuple[NodeId, int], NodeId]
    # The deepest position.
    bottom: int

    def __contains__(self, node: NodeId) -> bool:
        return node in self.nodes

    def __len__(self) -> int:
        return len(self.nodes)


def new_tree(root: NodeId, token: int, position: int) -> TokenTree:
    """A tree of one node, the start of a round."""
    node = TreeNode(parent=NO_PARENT, token=token, position=position, score=0.0)
    return TokenTree(root, {root: node}, {}, bottom=position)


def child(tree: TokenTree, node: NodeId, token: int) -> NodeId | None:
    """The child of ``node`` that carries ``token``."""
    return tree.index.get((node, token))


def children(tree: TokenTree, node: NodeId) -> tuple[NodeId, ...]:
    """The children of ``node``, oldest first."""
    return tuple(n for n, data in tree.nodes.items() if data.parent == node)


def ancestors(tree: TokenTree, node: NodeId) -> tuple[NodeId, ...]:
    """The nodes above ``node``, nearest first, the root last."""
    path: list[NodeId] = []
    while node != tree.root:
        node = tree.nodes[node].parent
        path.append(node)
    return tuple(path)


def reroot(tree: TokenTree, node: NodeId) -> TokenTree:
    """The tree below ``node``, which becomes the root; scores are conditioned on it."""
    if node == tree.root:
        return tree
    top = tree.nodes[node]
    nodes = {node: TreeNode(NO_PARENT, top.token, top.position, 0.0)}
    index: dict[tuple[NodeId, int], NodeId] = {}
    for n, data in tree.nodes.items():
        if data.parent in nodes:
            nodes[n] = TreeNode(data.parent, data.token, data.position, data.score - top.score)
            index[data.parent, data.token] = n
    bottom = max([data.position for data in nodes.values()])
    return TokenTree(node, nodes, index, bottom)


def merge(
    tree: TokenTree,
    grown: Grown,
    first_id: NodeId,
    *,
    walked: Sequence[int] = (),
    at_most: int | None = None,
    max_position: int | None = None,
) -> tuple[TokenTree, tuple[NodeId, ...]]:
    """Add the paths of a drafted tree that are new (FlowSpec III-D, Fig. 4).

    ``grown`` starts from the tip at the time of the draft request; ``walked`` are the tokens
    committed since, and candidates not below them are left out. New nodes get consecutive ids
    from ``first_id`` on, in the order of ``grown``: at most ``at_most`` of them, none deeper than
    ``max_position``. Existing nodes keep their ids and scores. Returns the tree and the new ids.
    """
    nodes = dict(tree.nodes)
    index = dict(tree.index)
    limit = len(grown[0]) if at_most is None else at_most
    at_root = len(walked)
    # Each candidate is either a step of the walk from the old tip, or a node of the tree.
    steps: dict[int, int] = {TIP: 0}
    place: dict[int, NodeId] = {TIP: tree.root} if at_root == 0 else {}
    base = 0.0
    new: list[NodeId] = []
    for i, (parent, token, score) in enumerate(zip(*grown, strict=True)):
        if parent in steps and steps[parent] < at_root:
            if token == walked[steps[parent]]:
                steps[i] = steps[parent] + 1
                if steps[i] == at_root:
                    place[i], base = tree.root, score
            continue
        above = place.get(parent)
        if above is None:
            continue
        existing = index.get((above, token))
        if existing is not None:
            place[i] = existing
            continue
        data = nodes[above]
        if len(new) >= limit or (max_position is not None and data.position >= max_position):
            continue
        node = NodeId(first_id + len(new))
        nodes[node] = TreeNode(above, token, data.position + 1, min(score - base, data.score))
        index[above, token] = node
        place[i] = node
        new.append(node)
    if not new:
        return tree, ()
    bottom = max(tree.bottom, max([nodes[n].position for n in new]))
    return TokenTree(tree.root, nodes, index, bottom), tuple(new)


def paths_to(tree: TokenTree, nodes: Iterable[NodeId]) -> Start:
    """The paths from the root to some nodes, which a token source needs to grow below them."""
    frontier = tuple(nodes)
    wanted = {above for node in frontier for above in (node, *ancestors(tree, node))}
    order = [n for n in tree.nodes if n in wanted and n != tree.root]
    index = {tree.root: TIP} | {node: i for i, node in enumerate(order)}
    data = [tree.nodes[node] for node in order]
    part = (
        tuple(index[d.parent] for d in data),
        tuple(d.token for d in data),
        tuple(d.score for d in data),
    )
    return Start(part, tuple(index[node] for node in frontier))


def by_score(tree: TokenTree, nodes: Iterable[NodeId]) -> tuple[NodeId, ...]:
    """Best first. Equal scores are broken by age, which keeps parents before their children."""
    return tuple(sorted(sorted(nodes), key=lambda n: tree.nodes[n].score, reverse=True))


def by_level(tree: TokenTree, nodes: Iterable[NodeId]) -> tuple[NodeId, ...]:
    """Level by level, oldest first: the order of EAGLE-2's own trees."""
    return tuple(sorted(nodes, key=lambda n: (tree.nodes[n].position, n)))


def connected(tree: TokenTree, nodes: Sequence[NodeId], sent: Container[NodeId]) -> bool:
    """Whether all parents are in ``sent`` or earlier in ``nodes``, but for the root's own."""
    seen: set[NodeId] = set()
    for node in nodes:
        parent = tree.nodes[node].parent
        if node != tree.root and parent not in sent and parent not in seen:
            return False
        seen.add(node)
    return True
