"""Drafts of another vocabulary: what is proposed says what the draft says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.tree import TIP
from asyncspec.source.base import StateSource
from asyncspec.source.by_text import TextSource
from asyncspec.source.expand import Grower, Proposal, path_grower
from asyncspec.source.vocabularies import Retokeniser, Vocabulary
from asyncspec.testing.sources import check_source
from asyncspec_protocol.ids import SessionId, Version
from asyncspec_protocol.messages import Expand, Expanded

LETTERS = b"abc"
END = b"<end>"


def vocabulary(longer: Sequence[bytes]) -> Vocabulary:
    """All letters, some longer texts, and an end."""
    texts = [*(bytes([letter]) for letter in LETTERS), *longer, b""]
    return Vocabulary(texts, {END: len(texts) - 1})


longer = st.text("abc", min_size=2, max_size=4).map(str.encode)
vocabularies = st.lists(longer, max_size=12, unique=True).map(vocabulary)


@st.composite
def texts(draw: st.DrawFn) -> tuple[Vocabulary, Vocabulary, tuple[int, ...]]:
    ours, theirs = draw(vocabularies), draw(vocabularies)
    tokens = draw(st.lists(st.integers(0, len(ours.ids) - 1), max_size=12))
    return ours, theirs, tuple(tokens)


def said(vocabulary: Vocabulary, tokens: Sequence[int]) -> bytes:
    return b"".join(map(vocabulary.text, tokens))


@given(texts())
def test_the_text_is_kept_however_it_is_cut(
    case: tuple[Vocabulary, Vocabulary, tuple[int, ...]],
) -> None:
    ours, theirs, tokens = case
    retokeniser = Retokeniser(ours, theirs)
    for result in (retokeniser.tokens(tokens), retokeniser.each(tokens)):
        assert said(theirs, result) == said(ours, tokens)
    for cut in range(len(tokens) + 1):
        parts = (tokens[:cut], tokens[cut:])
        assert sum(map(retokeniser.each, parts), ()) == retokeniser.each(tokens)
        # What comes later changes no text that was said before.
        assert said(ours, tokens).startswith(said(theirs, retokeniser.tokens(parts[0])))


@given(texts())
def test_ids_stay_where_texts_agree(
    case: tuple[Vocabulary, Vocabulary, tuple[int, ...]],
) -> None:
    ours, theirs, tokens = case
    assert Retokeniser(ours, ours).tokens(tokens) == tokens
    assert Retokeniser(ours, ours).agreeing == 1.0
    retokeniser = Retokeniser(ours, theirs)
    for token in tokens:
        if (text := ours.text(token)) in theirs.ids:
            assert retokeniser.whole(token) == (theirs.ids[text],)
    for token in retokeniser.tokens(tokens):
        # Only what the other vocabulary alone has joins several tokens.
        text = theirs.text(token)
        assert text not in ours.ids or any(text in ours.text(own) for own in tokens)


def test_special_tokens_are_those_of_their_names() -> None:
    ours, theirs = vocabulary([b"ab"]), vocabulary([])
    unnamed = Vocabulary([b"a"], {})
    assert Retokeniser(ours, theirs).each((4, 3)) == (3, 0, 1)
    assert Retokeniser(ours, unnamed).each((4, 3)) == (0,)
    assert Retokeniser(ours, unnamed).whole(3) == ()


class Texts(StateSource[bytes]):
    """A draft that goes on with what it is told, by the last letters of its text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(lambda job: b"", lambda text, token: text + vocabulary.text(token))
        self.vocabulary = vocabulary

    def grower(self, job: Expand) -> Grower:
        def successors(path: tuple[int, ...], width: int) -> Proposal:
            text = self._sessions[job.session][1] + said(self.vocabulary, path)
            weights = [1 + (hash_of(text[-6:] + bytes([token])) % 97) for token in range(self.size)]
            order = sorted(range(self.size), key=lambda token: (-weights[token], token))[:width]
            return order, [math.log(weights[token] / sum(weights)) for token in order]

        return path_grower(successors)

    @property
    def size(self) -> int:
        return len(self.vocabulary.texts)


def hash_of(text: bytes) -> int:
    return sum(byte * 31**place for place, byte in enumerate(text))


DRAFT, TARGET = vocabulary([b"ab", b"bca"]), vocabulary([b"abc", b"ca", b"bb"])


def test_it_obeys_what_every_source_owes() -> None:
    def make() -> TextSource:
        return TextSource(Texts(DRAFT), DRAFT, TARGET)

    check_source(make, vocab=len(TARGET.texts))


def expanded(draft: Any, ours: Vocabulary, committed: tuple[int, ...], **shape: int) -> Expanded:
    source = TextSource(draft, ours, TARGET)
    job = Expand(SessionId(0), Version(0), 0, committed, **shape)
    tree = source.run(job)
    assert isinstance(tree, Expanded)
    return tree


def paths(tree: Expanded) -> list[tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {TIP: ()}
    for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True)):
        found[node] = (*found[parent], token)
    return [found[node] for node in range(len(tree.tokens))]


class Certain(StateSource[bytes]):
    """A draft that is sure of one text."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(lambda job: b"", lambda state, token: state)
        self.tokens = tokens

    def grower(self, job: Expand) -> Grower:
        def successors(path: tuple[int, ...], width: int) -> Proposal:
            at = len(path)
            right = at < len(self.tokens) and list(path) == [*self.tokens[:at]]
            return ([self.tokens[at]], [0.0]) if right else ([], [])

        return path_grower(successors)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_a_sure_draft_proposes_its_text(tokens: list[int]) -> None:
    tree = expanded(Certain(tokens), DRAFT, (0,), depth=12, width=2, count=40)
    text = said(DRAFT, tokens)
    proposed = [said(TARGET, path) for path in paths(tree)]
    assert all(text.startswith(one) for one in proposed)
    assert max(map(len, proposed)) == len(text)


def test_several_tokens_become_one_that_only_the_target_has() -> None:
    ab, c = DRAFT.ids[b"ab"], DRAFT.ids[b"c"]
    tree = expanded(Certain([ab, c]), DRAFT, (), depth=1, width=3, count=4)
    assert (TARGET.ids[b"abc"],) in paths(tree)
