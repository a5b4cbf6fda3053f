"""Laws of the models of language: drafts are as good as asked, and as sure as they are good."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncspec.core.errors import UserError
from asyncspec.core.reference import decode
from asyncspec.sim.language import EMPTY, Coverage, Synthetic, follow, harmonic, sequential, tabled
from asyncspec.source.ngram import NGramSource
from asyncspec_nodes.plugins.simulation.recorded import (
    FORMAT,
    LanguageHeader,
    Recorded,
    RecordedText,
    measured,
    read_language,
)
from tools.bench.record_language import guesses, write_language

MANY = 6000

tables = st.one_of(
    st.floats(0.36, 1.0).map(harmonic),
    st.sampled_from([(0.65, 0.15, 0.08, 0.04), (0.5, 0.5), (1.0,), (0.4, 0.2, 0.2, 0.1)]).map(
        tabled
    ),
)
paths = st.integers(0, 2**64 - 1)


def rank_of_truth(language: Synthetic, path: int, stale: int = 0) -> int:
    tokens, _ = language.propose(path, 0, stale, 32)
    truth = language.truth(path)
    return list(tokens).index(truth) if truth in tokens else 99


@given(tables, st.floats(0.5, 1), paths, st.integers(0, 9), st.integers(1, 40))
def test_proposals_are_distinct_ordered_probabilities(
    coverage: Coverage, decay: float, path: int, stale: int, width: int
) -> None:
    language = Synthetic(coverage=coverage, decay=decay, vocab=64)
    tokens, scores = language.propose(path, 7, stale, width)
    assert (tokens, scores) == language.propose(path, 7, stale, width)
    assert 0 < len(tokens) == len(scores) <= width
    assert len(set(tokens)) == len(tokens)
    assert all(0 <= token < 64 for token in tokens)
    assert all(b <= a + 1e-9 for a, b in pairwise(scores))
    assert sum(map(math.exp, scores)) <= 1 + 1e-6


@given(tables, st.floats(0.5, 1), paths, st.integers(0, 9))
def test_more_unconfirmed_tokens_never_make_a_guess_better(
    coverage: Coverage, decay: float, path: int, stale: int
) -> None:
    language = Synthetic(coverage=coverage, decay=decay, vocab=64)
    fresh, later = (rank_of_truth(language, path, s) for s in (stale, stale + 1))
    assert fresh <= later


@pytest.mark.parametrize("top", [0.45, 0.65, 0.8, 0.95])
def test_coverage_by_rank_is_what_was_asked_for(top: float) -> None:
    language = Synthetic(coverage=harmonic(top))
    ranks = [rank_of_truth(language, follow(EMPTY, i)) for i in range(MANY)]
    for k in (1, 2, 4, 8):
        covered = sum(rank < k for rank in ranks) / MANY
        assert covered == pytest.approx(1 - (1 - top) / k, abs=0.02)


def test_a_table_of_ones_own_is_kept() -> None:
    table = (0.6, 0.2, 0.05, 0.05)
    language = Synthetic(coverage=tabled(table))
    ranks = [rank_of_truth(language, follow(EMPTY, i)) for i in range(MANY)]
    for rank, chance in enumerate(table):
        assert ranks.count(rank) / MANY == pytest.approx(chance, abs=0.02)
    assert ranks.count(99) / MANY == pytest.approx(0.1, abs=0.015)


def test_a_draft_is_right_as_often_as_it_says() -> None:
    language = Synthetic(coverage=harmonic(0.65))
    bins: dict[int, list[bool]] = {}
    for i in range(4 * MANY):
        path = follow(EMPTY, i)
        tokens, scores = language.propose(path, 0, 0, 1)
        bins.setdefault(int(10 * math.exp(scores[0])), []).append(tokens[0] == language.truth(path))
    # Confidence varies from node to node, and means what it says.
    assert len(bins) >= 6
    for tenth, right in bins.items():
        assert sum(right) / len(right) == pytest.approx((tenth + 0.5) / 10, abs=0.07)


def test_fading_multiplies_the_first_candidates_chance() -> None:
    language = Synthetic(coverage=harmonic(0.8), decay=0.9)
    for stale in (0, 1, 4):
        ranks = [rank_of_truth(language, follow(EMPTY, i), stale) for i in range(MANY)]
        assert ranks.count(0) / MANY == pytest.approx(0.8 * 0.9**stale, abs=0.02)


def test_copied_text_is_guessed_well_whatever_the_draft() -> None:
    for share, expected in ((0.0, 0.5), (0.5, 0.725), (1.0, 0.95)):
        language = Synthetic(coverage=harmonic(0.5), decay=0.9, repetition=share)
        hits = 0
        for i in range(MANY):
            path = follow(EMPTY, i)
            hits += language.propose(path, i, 0, 1)[0][0] == language.truth(path)
        assert hits / MANY == pytest.approx(expected, abs=0.04)


@given(st.lists(st.integers(0, 99), min_size=2, max_size=9))
def test_a_path_tells_order_and_every_token(tokens: list[int]) -> None:
    def path(of: list[int]) -> int:
        value = EMPTY
        for token in of:
            value = follow(value, token)
        return value

    assert (path(tokens[::-1]) == path(tokens)) == (tokens[::-1] == tokens)
    assert path(tokens[:-1]) != path(tokens)
    assert path([*tokens[:-1], tokens[-1] + 1]) != path(tokens)


@pytest.mark.parametrize(
    "table",
    [
        *((), (0.0,), (0.6, 0.6), (0.3, 0.4), (1.2,), (0.5, -0.1), (1.0, 1e-10)),
        *((math.nan,), (0.5, math.nan), (math.inf,), (0.5, math.inf), (0.5, -math.inf)),
    ],
)
def test_a_wrong_table_is_refused(table: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="chances by rank"):
        tabled(table)


chances = st.one_of(st.floats(0, 1), st.floats(0, 1e-8), st.floats())


@given(st.lists(chances, max_size=5), st.booleans(), paths)
@example([1.0 - 5e-10, 1e-9], False, 0)
def test_a_table_is_refused_or_gives_probabilities(
    table: list[float], ordered: bool, path: int
) -> None:
    try:
        coverage = tabled(sorted(table, reverse=True) if ordered else table)
    except ValueError:
        return
    assert 0 < coverage.top <= 1
    assert 0 <= coverage.floor <= 0.5
    assert max(coverage.cumulative, default=0.0) <= 1 + 1e-9
    tokens, scores = Synthetic(coverage=coverage, vocab=64).propose(path, 0, 1, 8)
    assert 0 < len(tokens) == len(scores)
    assert sum(map(math.exp, scores)) <= 1 + 1e-6


# --- recorded -----------------------------------------------------------------------------------

HEADER = LanguageHeader(FORMAT, "a target", "a draft", 50)


@st.composite
def recordings(draw: st.DrawFn) -> list[RecordedText]:
    def text() -> RecordedText:
        token = st.integers(0, 49)
        prompt = draw(st.lists(token, min_size=1, max_size=4))
        tokens = draw(st.lists(token, min_size=1, max_size=12))
        found = [draw(st.lists(token, max_size=5, unique=True)) for _ in tokens]
        scores = [tuple(-0.5 * (i + 1) for i in range(len(one))) for one in found]
        return RecordedText(tuple(prompt), tuple(tokens), tuple(map(tuple, found)), tuple(scores))

    texts = [text() for _ in range(draw(st.integers(1, 3)))]
    # The same prompt has one answer.
    return list({one.prompt: one for one in texts}.values())


@given(recordings())
def test_a_recording_says_what_was_recorded_on_its_path(texts: list[RecordedText]) -> None:
    language = Recorded(HEADER, texts[:1])
    text = texts[0]
    assert language.prompt(3, 999) == text.prompt
    assert language.longest(3) == len(text.tokens)
    assert decode(sequential(language), text.prompt, len(text.tokens)) == text.tokens
    path = EMPTY
    for token in text.prompt:
        path = follow(path, token)
    for token, found, scores in zip(text.tokens, text.candidates, text.scores, strict=True):
        assert language.propose(path, 0, 0, 3) == (found[:3], scores[:3])
        off = follow(path, (token + 1) % 50)
        assert 0 <= language.truth(off) < 50
        tokens, stated = language.propose(off, 0, 0, 4)
        assert language.propose(off, 0, 0, 4) == (tokens, stated)
        # As sure as it is somewhere on the path, of as many.
        assert len(set(tokens)) == len(tokens) == len(stated)
        assert stated in {one[:n] for one in text.scores for n in range(5)}
        path = follow(path, token)


@given(recordings())
def test_measured_coverage_counts_the_first_candidates(texts: list[RecordedText]) -> None:
    coverage = measured(texts)
    places = [(t, c) for text in texts for t, c in zip(text.tokens, text.candidates, strict=True)]
    hits = sum(found[:1] == (token,) for token, found in places)
    assert coverage.top == pytest.approx((hits + 0.5) / (len(places) + 1))
    assert max(coverage.cumulative, default=0) <= 1 + 1e-9
    assert list(coverage.logs) == sorted(coverage.logs, reverse=True)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    texts = [RecordedText((1, 2), (3, 4), ((3, 9), ()), ((-0.1, -2.5), ()))]
    write_language(tmp_path / "l", HEADER, texts)
    language = read_language(tmp_path / "l")
    assert language.header == HEADER
    assert language.longest(0) == 2
    assert language.prompt(0, 0) == (1, 2)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "is not a recorded language"),
        (['{"event":"trace"}'], "is not a recorded language"),
        (['{"language":9,"target":"","draft":"","vocab":5}'], "has language format 9"),
        (["H"], "holds no texts"),
        (["H", "{"], "damaged in line 2"),
        (["H", '{"prompt":[],"tokens":[1],"candidates":[[]],"scores":[[]]}'], "length >= 1"),
        (["H", '{"prompt":[1],"tokens":[1],"candidates":[],"scores":[]}'], "every token has"),
        (["H", '{"prompt":[1],"tokens":[7],"candidates":[[]],"scores":[[]]}'], "0 to 4"),
        (["H", '{"prompt":[1],"tokens":[1],"candidates":[[1,1]],"scores":[[0,0]]}'], "differ"),
        (
            ["H", '{"prompt":[1],"tokens":[1],"candidates":[[1,2]],"scores":[[-2,-1]]}'],
            "best first",
        ),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path: Path, lines: list[str], says: str) -> None:
    header = '{"language":1,"target":"t","draft":"d","vocab":5}'
    path = tmp_path / "l"
    path.write_text("\n".join(header if line == "H" else line for line in lines))
    with pytest.raises(UserError, match=says):
        read_language(path)
    with pytest.raises(UserError, match="cannot read the language"):
        read_language(tmp_path / "none")


def test_a_token_source_is_asked_at_every_place_of_a_text() -> None:
    prompt, tokens = (1, 2, 3, 9, 1, 2), (3, 9, 5)
    text = guesses(NGramSource().run, prompt, tokens, 4)
    assert (text.prompt, text.tokens) == (prompt, tokens)
    # After "1 2" came 3, after "2 3" came 9, after "3 9" came 1: right, right, wrong.
    assert [found[:1] for found in text.candidates] == [(3,), (9,), (1,)]
    assert all(len(f) == len(s) for f, s in zip(text.candidates, text.scores, strict=True))
