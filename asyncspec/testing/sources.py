"""What every token source without the target's features owes a draft machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.core.jobs import DraftBatch, Release
from asyncspec.core.tree import TIP
from asyncspec.source.base import TokenSource
from asyncspec_protocol.ids import SessionId, Version
from asyncspec_protocol.messages import Expand, Expanded

Make = Callable[[], TokenSource]
"""A new source that knows nothing of any session."""

_TENANTS = ("", "first", "second")


def check_source(make: Make, vocab: int = 8, max_examples: int = 100) -> None:
    """Check a token source on generated texts.

    Arguments:
        make: called for every text, so that it should reuse a model's weights.
        vocab: tokens of the texts are below this number.
        max_examples: groups of texts to try.

    Raises:
        AssertionError: it breaks a law.
    """
    check_sessions(make)
    texts = st.lists(st.integers(0, vocab - 1), min_size=1, max_size=40).map(tuple)

    @settings(max_examples=max_examples)
    @given(st.lists(texts, min_size=1, max_size=3), shapes(), st.data())
    def check(texts: list[tuple[int, ...]], shape: Expand, data: st.DataObject) -> None:
        jobs = [
            replace(shape, session=SessionId(number), committed=text, prompt_length=len(text) // 2)
            for number, text in enumerate(texts)
        ]
        source = make()
        grown = [_expanded(source, job) for job in jobs]
        for job, tree in zip(jobs, grown, strict=True):
            check_tree(job, tree)
        check_together(make, jobs, grown)
        cut = data.draw(st.integers(1, len(texts[0])))
        check_in_pieces(make, jobs[0], grown[0], cut)
        check_tenants(make, jobs, grown[0])

    check()


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


def check_together(make: Make, jobs: Sequence[Expand], grown: Sequence[Expanded]) -> None:
    """Trees that are grown together are those that are grown one by one."""
    assert make().run(DraftBatch(tuple(jobs))) == tuple(grown)


def check_in_pieces(make: Make, job: Expand, tree: Expanded, cut: int) -> None:
    """A text that is committed in two pieces leads to the same tree."""
    source = make()
    source.run(replace(job, committed=job.committed[:cut], count=0))
    rest = replace(job, base=cut, committed=job.committed[cut:], tenant="", prompt_length=0)
    assert _expanded(source, rest) == tree


def check_tenants(make: Make, jobs: Sequence[Expand], tree: Expanded) -> None:
    """What other tenants were answered changes nothing."""
    source = make()
    for number, job in enumerate(reversed(jobs), 1):
        foreign = replace(job, session=SessionId(number), tenant=_TENANTS[number % 2 + 1])
        source.run(replace(foreign, prompt_length=0))
        source.run(Release(foreign.session))
    assert _expanded(source, jobs[0]) == tree


def check_sessions(make: Make) -> None:
    """A request that does not follow what the source knows is refused, a session that is unknown
    may be released, and one that was released begins anew."""
    source = make()
    source.run(Release(SessionId(5)))
    opening = Expand(SessionId(5), Version(0), 0, (1, 2), 2, 2, 4)
    for base in (1, 3):
        try:
            source.run(replace(opening, base=base))
        except ValueError:
            pass
        else:
            raise AssertionError(f"a new session began with a request from token {base} on")
    tree = _expanded(source, opening)
    source.run(Release(SessionId(5)))
    assert _expanded(source, opening) == tree


def _expanded(source: TokenSource, job: Expand) -> Expanded:
    tree = source.run(job)
    assert isinstance(tree, Expanded)
    return tree
