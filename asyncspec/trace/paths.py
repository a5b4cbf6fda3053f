"""The committed path of every session, from what the stages were given and what came back.

A verdict says which token follows a node; the node that carries it is the child with that token.
So the path is walked from the last prompt node, without asking the draft node's memory. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from asyncspec.trace import records
from asyncspec.trace.log import Life
from asyncspec.trace.stages import StageView
from asyncspec_protocol.messages import Segment, Verdict


@dataclass
class Path:
    """One session. Nodes are ids; ``verdicts`` maps a node to the token after it and the segment
    that brought it."""

    session: int
    prompt_length: int = 0
    # By parent: token to node.
    children: dict[int, dict[int, int]] = field(default_factory=dict)
    verdicts: dict[int, tuple[int, int]] = field(default_factory=dict)
    # After the prompt: node after node.
    nodes: list[int] = field(default_factory=list)

    def useful(self, node: int) -> bool:
        """Whether a node ended on the committed path."""
        return node < self.prompt_length or node in self._members

    def at(self, place: int) -> int:
        """The node after ``place`` tokens; 0 is the last prompt node; -1 past the end."""
        if place == 0:
            return self.prompt_length - 1
        return self.nodes[place - 1] if place <= len(self.nodes) else -1

    def walk(self) -> None:
        """Find the path, once all is known."""
        at = self.prompt_length - 1
        while at in self.verdicts:
            token, _ = self.verdicts[at]
            following = self.children.get(at, {}).get(token)
            if following is None:
                break
            self.nodes.append(following)
            at = following
        self._members = frozenset(self.nodes)

    _members: frozenset[int] = frozenset()


def read_paths(drafts: Sequence[Life], stages: Iterable[StageView]) -> Mapping[int, Path]:
    """The paths of all sessions that can be followed."""
    paths: dict[int, Path] = {}
    for view in stages:
        for session, length in view.prompts.items():
            paths.setdefault(session, Path(session)).prompt_length = length
        for visit in view.visits.values():
            _add_nodes(paths, visit.message)
    for life in drafts:
        for step in life.steps:
            if isinstance(step.input, records.Received):
                _add_verdict(paths, step.input.message)
    for path in paths.values():
        path.walk()
    return paths


def _add_nodes(paths: dict[int, Path], message: Segment) -> None:
    """Where a segment comes with tokens: at the first stage, and at later ones if draws depend on
    them."""
    if not message.tokens:
        return
    path = paths.setdefault(message.session, Path(message.session))
    for node, parent, token in zip(message.ids, message.parents, message.tokens, strict=True):
        # Of two nodes for one token the elder was dead when the younger was issued.
        children = path.children.setdefault(parent, {})
        children[token] = max(node, children.get(token, node))


def _add_verdict(paths: dict[int, Path], message: object) -> None:
    match message:
        case Verdict(session, segment, _, ids, tokens) if session in paths:
            for node, token in zip(ids, tokens, strict=True):
                paths[session].verdicts.setdefault(node, (token, segment))
