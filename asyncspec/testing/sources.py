"""What every token source owes a draft machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.core.jobs import DraftBatch, Feed, Release, TensorRows
from asyncspec.core.tree import TIP
from asyncspec.source.base import TokenSource
from asyncspec.testing.examples import unhurried
from asyncspec_protocol.ids import SessionId, Version
from asyncspec_protocol.messages import Expand, Expanded

Make = Callable[[], TokenSource]
"""A new source that knows nothing of any session."""

Features = Callable[[Sequence[int]], TensorRows]
"""The target's features of a text's tokens, but the last one's: [n - 1, width], oldest first."""

_TENANTS = ("", "first", "second")


def check_source(
    make: Make, vocab: int = 8, max_examples: int = 100, features: Features | None = None
) -> None:
    """Check a token source on generated texts.

    Arguments:
        make: called for every text, so that it should reuse a model's weights.
        vocab: tokens of the texts are below this number.
        max_examples: groups of texts to try.
        features: for a source that reads the target's, by text; None: it reads none.

    Raises:
        AssertionError: it breaks a law.
    """
    feeding = Feeding(make, features)
    check_sessions(feeding)
    if features is not None:
        check_features(feeding)
    texts = st.lists(st.integers(0, vocab - 1), min_size=1, max_size=40).map(tuple)

    @unhurried(max_examples)
    @given(st.lists(texts, min_size=1, max_size=3), shapes(), st.data())
    def check(texts: list[tuple[int, ...]], shape: Expand, data: st.DataObject) -> None:
        jobs = [
            replace(shape, session=SessionId(number), committed=text, prompt_length=len(text) // 2)
            for number, text in enumerate(texts)
        ]
        source = feeding.new()
        grown = [source.expand(job) for job in jobs]
        for job, tree in zip(jobs, grown, strict=True):
            check_tree(job, tree)
        check_together(feeding, jobs, grown)
        cut = data.draw(st.integers(1, len(texts[0])))
        check_in_pieces(feeding, jobs[0], grown[0], cut)
        check_tenants(feeding, jobs, grown[0])

    check()


class FedSource:
    """A source whose sessions get the features that their next tokens need, if it reads any."""

    def __init__(self, source: TokenSource, features: Features | None) -> None:
        self.run = source.run
        self._features = features
        # Committed tokens by session.
        self._texts: dict[SessionId, tuple[int, ...]] = {}

    def feed(self, job: Expand) -> None:
        """Hand over the features of all that precedes the last token which ``job`` commits."""
        text = (*self._texts.get(job.session, ())[: job.base], *job.committed)
        self._texts[job.session] = text
        if self._features is None:
            return
        start, rows = max(job.base - 1, 0), self._features(text)
        if later := rows.rows[start:]:
            self.run(Feed(job.session, start, (TensorRows(rows.handle, later),)))

    def expand(self, job: Expand) -> Expanded:
        """The tree of a job, after its features."""
        self.feed(job)
        tree = self.run(job)
        assert isinstance(tree, Expanded)
        return tree

    def release(self, session: SessionId) -> None:
        """End a session, which may be unknown."""
        self._texts.pop(session, None)
        self.run(Release(session))


class Feeding(NamedTuple):
    """How sources are made, and what they read."""

    make: Make
    features: Features | None

    def new(self) -> FedSource:
        """A new source."""
        return FedSource(self.make(), self.features)


@st.composite
def shapes(draw: st.DrawFn) -> Expand:
    """Requests of a new session, without its tokens."""
    depth, width = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    request = Expand(SessionId(0), Version(3), 0, (), depth, width, draw(st.integers(1, 12)))
    return replace(request, beam=draw(st.integers(0, 4)), fixed_width=draw(st.booleans()))


def check_tree(job: Expand, tree: Expanded) -> None:
    """A tree is no larger than was asked for, parents come before their children, no two children
    of a node are the same token, and none is likelier than its parent."""
    tree.check()
    assert (tree.session, tree.version) == (job.session, job.version)
    assert tree.base == job.base + len(job.committed)
    assert len(tree.tokens) <= job.count
    levels, children = {TIP: 0}, list(zip(tree.parents, tree.tokens, strict=True))
    assert len(set(children)) == len(children)
    for node, (parent, score) in enumerate(zip(tree.parents, tree.scores, strict=True)):
        levels[node] = levels[parent] + 1
        assert score <= (0.0 if parent == TIP else tree.scores[parent])
        assert tree.parents.count(parent) <= job.width
    assert max(levels.values()) <= job.depth


def check_together(feeding: Feeding, jobs: Sequence[Expand], grown: Sequence[Expanded]) -> None:
    """Trees that are grown together are those that are grown one by one."""
    source = feeding.new()
    for job in jobs:
        source.feed(job)
    assert source.run(DraftBatch(tuple(jobs))) == tuple(grown)


def check_in_pieces(feeding: Feeding, job: Expand, tree: Expanded, cut: int) -> None:
    """A text that is committed in two pieces leads to the same tree."""
    source = feeding.new()
    source.expand(replace(job, committed=job.committed[:cut], count=0))
    rest = replace(job, base=cut, committed=job.committed[cut:], tenant="", prompt_length=0)
    assert source.expand(rest) == tree


def check_tenants(feeding: Feeding, jobs: Sequence[Expand], tree: Expanded) -> None:
    """What other tenants were answered changes nothing."""
    source = feeding.new()
    for number, job in enumerate(reversed(jobs), 1):
        foreign = replace(job, session=SessionId(number), tenant=_TENANTS[number % 2 + 1])
        source.expand(replace(foreign, prompt_length=0))
        source.release(foreign.session)
    assert source.expand(jobs[0]) == tree


_OPENING = Expand(SessionId(5), Version(0), 0, (1, 2, 1), 2, 2, 4)


def check_sessions(feeding: Feeding) -> None:
    """A request that does not follow what the source knows is refused, a session that is unknown
    may be released, and one that was released begins anew."""
    source = feeding.new()
    source.release(_OPENING.session)
    for base in (1, 4):
        _check_refused(source, replace(_OPENING, base=base), "a session began at a later token")
    tree = source.expand(_OPENING)
    source.release(_OPENING.session)
    assert source.expand(_OPENING) == tree


def check_features(feeding: Feeding) -> None:
    """Features with a gap are refused, as is a request whose features are missing or too few."""
    assert feeding.features is not None
    source, rows = feeding.new(), feeding.features(_OPENING.committed)
    _check_refused(source, _OPENING, "tokens were committed without features")
    source = feeding.new()
    late = Feed(_OPENING.session, 1, (TensorRows(rows.handle, rows.rows[1:]),))
    _check_refused(source, late, "features were taken that leave out the first one")
    source = feeding.new()
    source.run(Feed(_OPENING.session, 0, (TensorRows(rows.handle, rows.rows[:1]),)))
    _check_refused(source, _OPENING, "two tokens were committed with the features of one")


def _check_refused(source: FedSource, job: Expand | Feed, problem: str) -> None:
    try:
        source.run(job)
    except ValueError:
        return
    raise AssertionError(problem)
