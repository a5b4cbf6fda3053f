"""Stop strings: the text ends before the first that is complete, wherever tokens are cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.backend.tokenizer import Tokenizer
from asyncspec_nodes.serving.text import (
    UNFINISHED,
    AnswerText,
    Detokenizer,
    find,
    partial_stop_length,
)
from nodes.toy_tokenizers import CODECS, Pieces, Raw

CHARACTERS = "ab\né世🙂"
# Few letters make stop strings that overlap each other and themselves.
texts = st.one_of(st.text("ab", max_size=30), st.text(CHARACTERS, max_size=30))
one_stop = st.one_of(
    st.text("ab", min_size=2, max_size=5), st.text(CHARACTERS, min_size=1, max_size=4)
)
some_stops = st.lists(one_stop, min_size=1, max_size=4)


def by_character(text: str, stops: Sequence[str], *, include: bool = False) -> tuple[str, int]:
    """The definition: the answer's text, and how many characters of ``text`` it has taken."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end if include else end - max(map(len, complete))], end
    return text, len(text)


class Stream:
    """What a user sees of an answer whose tokens come in portions."""

    def __init__(
        self, tokenizer: Tokenizer, ids: Sequence[int], cuts: Sequence[int], answer: AnswerText
    ) -> None:
        self.shown: list[str] = []
        self.kept = 0
        self.stopped = False
        # What was shown, and the tokens it was made of, after each portion.
        self.moments: list[tuple[str, int]] = []
        for start, end in pairwise([0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]):
            piece = answer.push(ids[start:end])
            self.kept += piece.tokens
            self.shown.append(piece.text)
            self.moments.append((self.text, self.kept))
            if piece.stopped:
                self.stopped = True
                return
        piece = answer.finish()
        self.shown.append(piece.text)
        self.stopped = piece.stopped

    @property
    def text(self) -> str:
        return "".join(self.shown)


@st.composite
def vocabularies(draw: st.DrawFn, text: str) -> tuple[Pieces, list[int]]:
    """A text cut in tokens anywhere, also within characters."""
    data = text.encode()
    cuts = draw(st.lists(st.integers(0, len(data)), max_size=len(data)))
    pieces = [data[a:b] for a, b in pairwise([0, *sorted(cuts), len(data)])]
    return Pieces(pieces), list(range(len(pieces)))


@given(texts, some_stops, st.lists(st.integers(0, 1000), max_size=9), st.booleans(), st.data())
def test_the_text_is_a_matter_of_characters_alone(
    text: str, stops: list[str], cuts: list[int], include: bool, data: st.DataObject
) -> None:
    codec, ids = data.draw(vocabularies(text))
    stream = Stream(codec, ids, cuts, AnswerText(codec, stops, include=include))
    want, taken = by_character(text, stops, include=include)
    assert stream.text == want
    assert all(want.startswith(shown) for shown, _ in stream.moments)
    # The token that completed it is the first whose bytes reach the end of the stop string.
    size = len(text[:taken].encode())
    whole = [n for n in range(len(ids) + 1) if len(b"".join(codec.pieces[:n])) >= size]
    assert stream.stopped == (find(text, stops) is not None)
    assert stream.kept == (whole[0] if stream.stopped else len(ids))


@given(texts, some_stops, st.data())
def test_text_is_held_back_only_while_a_stop_string_may_begin_in_it(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    codec, ids = data.draw(vocabularies(text))
    certain, plain = "", Detokenizer(codec)
    stream = Stream(codec, ids, range(len(ids)), AnswerText(codec, stops))
    shown = {kept: text for text, kept in stream.moments}
    for count, token in enumerate(ids, start=1):
        certain += plain.push((token,))
        if count < stream.kept:
            held = max(n for stop in stops for n in range(len(stop)) if certain.endswith(stop[:n]))
            assert shown[count] == certain[: len(certain) - held]


@pytest.mark.parametrize("name", CODECS)
@given(data=st.data())
def test_tokens_of_all_kinds(name: str, data: st.DataObject) -> None:
    """Also byte runs that are no characters: an answer that ends with a token has the text that
    its tokens have together."""
    codec = CODECS[name]
    ids = data.draw(st.lists(st.integers(0, codec.tokenizer.get_vocab_size() - 1), max_size=20))
    cuts = data.draw(st.lists(st.integers(0, 1000), max_size=9))
    text = codec.decode(ids)
    slices = st.tuples(st.integers(0, len(text)), st.integers(1, 3))
    drawn = [text[a : a + n] for a, n in data.draw(st.lists(slices, min_size=1, max_size=3))]
    stops = [stop for stop in drawn if stop and UNFINISHED not in stop] or ["a"]
    want, kept = by_token(codec, ids, stops)
    stream = Stream(codec, ids, cuts, AnswerText(codec, stops))
    assert (stream.text, stream.kept) == (want, kept)


def by_token(codec: Raw, ids: Sequence[int], stops: Sequence[str]) -> tuple[str, int]:
    """The text of the fewest tokens that have a stop string, and their number."""
    for count in range(1, len(ids) + 1):
        text = codec.decode(ids[:count]).rstrip(UNFINISHED)
        if find(text, stops) is not None:
            return by_character(text, stops)[0], count
    return codec.decode(ids), len(ids)


def test_a_stop_string_ends_with_the_last_byte_of_a_run_not_with_the_token_after_it() -> None:
    codec = CODECS["byte fallback"]
    ids = [codec.tokenizer.token_to_id(name) for name in ("a", "<0xC3>", "<0xA9>", "bc")]
    stream = Stream(codec, ids, range(5), AnswerText(codec, ["é"]))
    assert (stream.text, stream.kept, stream.stopped) == ("a", 3, True)


def test_a_tokenizer_that_reshapes_is_stopped_as_soon() -> None:
    class Reshaping(Pieces):
        decodes_as_whole = True

    codec = Reshaping([b"one", b" two", b" three"])
    answer = AnswerText(codec, ["wo"])
    assert answer.push([0]).text == ""
    piece = answer.push([1, 2])
    assert (piece.text, piece.tokens, piece.stopped) == ("one t", 1, True)


@pytest.mark.parametrize(
    ("text", "stops", "held"),
    [
        ("ab", ["abc"], 2),
        ("ab", ["bx", "abc"], 2),
        ("abc", ["x"], 0),
        ("aa", ["aab"], 2),
        ("", ["a"], 0),
    ],
)
def test_the_beginning_of_a_stop_string(text: str, stops: list[str], held: int) -> None:
    assert partial_stop_length(text, stops) == held
