"""A draft model whose vocabulary is not its target's: what it proposes becomes tokens of the target
with the same text. The target draws, so its text is its own whatever is proposed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from asyncspec.core.jobs import FeatureJob
from asyncspec.core.tree import TIP
from asyncspec.source.base import TokenSource
from asyncspec.source.expand import Coroutine, Grower, Proposal
from asyncspec.source.vocabularies import Retokeniser, Tokens, Vocabulary
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import Expand

LOOKED_AHEAD = 4
"""Tokens of a node behind which the next ones are looked up, as both may be one of the target's."""

LEAST_CHANCE = 0.02
"""The chance of such a token."""


class _Rest(NamedTuple):
    """The tokens that are left of a draft's token which is several of the target's."""

    tokens: Tokens
    chance: float
    # The draft's token, and the draft's node that it follows.
    token: int
    above: int


class _Way(NamedTuple):
    """What a proposed token of the target is to the draft."""

    chance: float = 0.0
    # The draft's tokens that it is, and the node that they follow; None: it is a part of others.
    path: Tokens | None = None
    above: int = TIP
    rests: tuple[_Rest, ...] = ()

    def joined(self, other: _Way) -> _Way:
        """The same token by both ways."""
        first = self if self.path is not None else other
        chance = self.chance + other.chance
        return _Way(chance, first.path, first.above, self.rests + other.rests)


class _Node(NamedTuple):
    """A candidate of the target's tree. ``draft``: the draft's node with its text, or None in the
    middle of a draft's token."""

    draft: int | None
    rests: tuple[_Rest, ...]
    # The chance of being at the end of a draft's token.
    ends: float


class TextGrower(Grower):
    """A target's tree over ``grower``, which grows the draft's own."""

    def __init__(self, grower: Grower, to_target: Retokeniser, to_draft: Retokeniser) -> None:
        self._grower = grower
        self._to_target, self._to_draft = to_target, to_draft
        self._nodes = {TIP: _Node(TIP, (), 1.0)}
        self._ways: dict[tuple[int, int], _Way] = {}
        # The draft's candidates: by parent and token, and how many there are.
        self._children: dict[tuple[int, int], int] = {}

    def add_child(self, parent: int, token: int) -> None:
        way = self._ways.get((parent, token))
        above = self._nodes[parent].draft
        if way is None and above is None:
            node = _Node(None, (), 0.0)  # another's node, which the draft has no place for
        elif way is None:
            assert above is not None
            node = _Node(self._below(above, self._to_draft.each((token,))), (), 1.0)
        elif way.path is None:
            node = _Node(None, way.rests, 0.0)
        else:
            ends = 1.0 - sum(rest.chance for rest in way.rests) / way.chance
            node = _Node(self._below(way.above, way.path), way.rests, ends)
        self._nodes[len(self._nodes) - 1] = node

    def prepare(self, nodes: Sequence[int]) -> Iterator[Any]:
        wanted = [node.draft for index in nodes if (node := self._nodes[index]).draft is not None]
        yield from self._computed([draft for draft in wanted if draft is not None])
        ahead: list[int] = []
        for draft in wanted:
            if draft is not None:
                ahead += [self._below(draft, (token,)) for token, _ in self._open(draft)]
        yield from self._computed(ahead)

    def propose(self, nodes: Sequence[int], width: int) -> list[Proposal]:
        return [self._proposal(node, width) for node in nodes]

    def _proposal(self, index: int, width: int) -> Proposal:
        node = self._nodes[index]
        ways: dict[int, _Way] = {}
        total = node.ends + sum(rest.chance for rest in node.rests)
        for rest in node.rests:
            first, *others = rest.tokens
            chance = rest.chance / total
            if others:
                way = _Way(chance, rests=(rest._replace(tokens=tuple(others), chance=chance),))
            else:
                way = _Way(chance, (rest.token,), rest.above)
            ways[first] = ways[first].joined(way) if first in ways else way
        if node.draft is not None and node.ends > 0.0:
            for token, way in self._successors(node.draft, width):
                scaled = self._scaled(way, node.ends / total)
                ways[token] = ways[token].joined(scaled) if token in ways else scaled
        likely = [item for item in ways.items() if item[1].chance > 0.0]
        best = sorted(likely, key=lambda item: -item[1].chance)[:width]
        self._ways |= {(index, token): way for token, way in best}
        log_probs = [math.log(min(1.0, way.chance)) for _, way in best]
        return [token for token, _ in best], log_probs

    def _scaled(self, way: _Way, factor: float) -> _Way:
        rests = tuple(rest._replace(chance=rest.chance * factor) for rest in way.rests)
        return way._replace(chance=way.chance * factor, rests=rests)

    def _successors(self, draft: int, width: int) -> Iterator[tuple[int, _Way]]:
        """The target's tokens after a node of the draft; a token may come several times."""
        ((tokens, log_probs),) = self._grower.propose([draft], width)
        joined = {token: self._joined(draft, token) for token, _ in self._open(draft)}
        for token, log_prob in zip(tokens, log_probs, strict=True):
            chance = math.exp(log_prob)
            for whole, path, share in joined.get(token, ()):
                yield whole, _Way(chance * share, path, draft)
                chance -= chance * share
            said = self._to_target.whole(token)
            if not said or chance <= 0.0:
                continue
            if len(said) == 1:
                yield said[0], _Way(chance, (token,), draft)
            else:
                yield said[0], _Way(chance, rests=(_Rest(said[1:], chance, token, draft),))

    def _open(self, draft: int) -> list[tuple[int, float]]:
        """Likely successors of a node that may be the beginning of a longer token of the target."""
        ((tokens, log_probs),) = self._grower.propose([draft], LOOKED_AHEAD)
        vocabulary = self._to_target.source
        return [
            (token, math.exp(log_prob))
            for token, log_prob in zip(tokens, log_probs, strict=True)
            if log_prob > math.log(LEAST_CHANCE)
            and (text := vocabulary.text(token))
            and self._to_target.goes_on(text)
        ]

    def _joined(self, draft: int, token: int) -> Iterator[tuple[int, Tokens, float]]:
        """Tokens of the target that are a draft's token with the one behind it, what they are to
        the draft, and the share of the former's chance that is left at each."""
        vocabulary = self._to_target.source
        ((tokens, log_probs),) = self._grower.propose([self._below(draft, (token,))], LOOKED_AHEAD)
        left = 1.0
        for second, log_prob in zip(tokens, log_probs, strict=True):
            if not (text := vocabulary.text(second)):
                continue
            whole = self._to_target.only_there(vocabulary.text(token) + text)
            if whole is not None and left > 0.0:
                share = min(1.0, math.exp(log_prob) / left)
                left *= 1.0 - share
                yield whole, (token, second), share

    def _computed(self, drafts: list[int]) -> Iterator[Any]:
        """Passes until all of some nodes are computed: of each path they do the uppermost."""
        while drafts:
            passes = 0
            for need in self._grower.prepare(drafts):
                passes += 1
                yield need
            if not passes:
                return

    def _below(self, draft: int, path: Tokens) -> int:
        """The draft's candidate that a path leads to, added where there is none."""
        for token in path:
            if (draft, token) not in self._children:
                self._grower.add_child(draft, token)
                self._children[draft, token] = len(self._children)
            draft = self._children[draft, token]
        return draft


class TextSource(TokenSource):
    """A draft model behind two vocabularies. Its sessions are as long as the draft's text is.
    ``usable``: the share of the draft's tokens that can be said in the target's."""

    def __init__(
        self, source: TokenSource, draft: Vocabulary, target: Vocabulary, usable: float = 1.0
    ) -> None:
        self._source, self.usable = source, usable
        self._to_target, self._to_draft = Retokeniser(draft, target), Retokeniser(target, draft)
        # Committed tokens of the target, and of the draft.
        self._lengths: dict[SessionId, tuple[int, int]] = {}

    def commit(self, job: Expand) -> Coroutine[Any, int]:
        length, drafted = self._lengths.get(job.session, (0, 0))
        if length != job.base:
            raise ValueError(f"the source knows {length} tokens, not {job.base}")
        committed = self._to_draft.each(job.committed)
        drafted = yield from self._source.commit(replace(job, base=drafted, committed=committed))
        length += len(job.committed)
        self._lengths[job.session] = length, drafted
        return length

    def grower(self, job: Expand) -> Grower:
        return TextGrower(self._source.grower(job), self._to_target, self._to_draft)

    def tree_grower(self, job: Expand) -> Grower:
        return TextGrower(self._source.tree_grower(job), self._to_target, self._to_draft)

    def compute(self, passes: Sequence[Any]) -> None:
        self._source.compute(passes)

    def release(self, session: SessionId) -> None:
        self._lengths.pop(session, None)
        self._source.release(session)

    def abandon(self, job: FeatureJob) -> None:
        self._source.abandon(job)
