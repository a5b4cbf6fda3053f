"""Masks along paths, held against the plain definition."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.constraint import text
from asyncspec.constraint.grammar import (
    MAX_CHARACTERS,
    MAX_COMPILED,
    GrammarError,
    Grammars,
    Vocabulary,
)
from asyncspec.constraint.source import FEW, ConstrainedSource, masked
from asyncspec.source.ngram import NGramSource
from asyncspec_protocol.ids import SessionId, Version
from asyncspec_protocol.messages import Expand, Expanded
from languages import EOS, GRAMMARS, LANGUAGES, SPELLED, Words

tokens = st.lists(st.integers(0, len(SPELLED) - 1), max_size=6)
words = st.lists(st.sampled_from(["a", "ab", "bc", "cab", "dd", "bba"]), min_size=1, max_size=3)


@given(
    st.builds(Words, words.map(tuple), st.integers(1, 5)),
    st.lists(st.tuples(tokens, st.booleans()), max_size=8),
)
def test_a_mask_is_what_may_follow_the_path(
    language: Words, steps: list[tuple[list[int], bool]]
) -> None:
    """Whatever paths the matcher was on before, and whatever of them is committed."""
    matcher = GRAMMARS.matcher(language.grammar)
    committed: list[int] = []
    for path, commit in steps:
        want = language.allowed([*committed, *path])
        found = matcher.allowed(path)
        assert (None if found is None else found.tolist()) == want
        if commit and want is not None:
            assert matcher.commit(path)
            committed += path
            assert matcher.complete == (EOS in want)
    assert matcher.commit([SPELLED.index(b"c")] * 9) == (
        language.allowed([*committed, *[SPELLED.index(b"c")] * 9]) is not None
    )


def test_matchers_of_one_grammar_are_independent() -> None:
    one, other = (GRAMMARS.matcher(LANGUAGES[0].grammar) for _ in range(2))
    before = other.allowed([])
    one.commit([3])
    assert before is not None
    assert other.allowed([]).tolist() == before.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "objct"}, "Invalid type"),
        ({"not": {"type": "string"}}, "not"),
        ({"$ref": "#"}, "^no text fits it$"),
        ({"$ref": "#/nope"}, "'/nope' does not exist"),
        (False, "Unsatisfiable"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(schema: object, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        GRAMMARS.matcher(text.of_schema(schema))  # type: ignore[arg-type]


def test_a_compiler_s_own_mistake_is_no_backtrace() -> None:
    with pytest.raises(GrammarError) as refused:
        GRAMMARS.matcher('start: a::0\na::_: "x" a::incr(_)')
    assert "backtrace" not in str(refused.value)


def test_a_target_without_an_end_of_text_token_has_no_grammars() -> None:
    grammars = Grammars(lambda: Vocabulary(SPELLED, (), ()))
    assert "no end-of-text token" in str(grammars.problem(LANGUAGES[0].grammar))


def test_compiled_grammars_are_bounded() -> None:
    grammars = Grammars(lambda: Vocabulary((*SPELLED, b"<end>"), {EOS}, (EOS,)))
    for count in range(1, MAX_COMPILED + 10):
        assert grammars.problem(text.of_choice(["a" * count, 'b"'])) is None
    assert len(grammars._compiled) == MAX_COMPILED


def test_large_grammars_are_not_kept_together() -> None:
    grammars = Grammars(lambda: Vocabulary((*SPELLED, b"<end>"), {EOS}, (EOS,)))
    large = [f"// {i}" + "x" * (MAX_CHARACTERS // 3) + "\nstart: /a/" for i in range(5)]
    for grammar in large:
        assert grammars.problem(grammar) is None
    assert list(grammars._compiled) == large[-2:]
    # One that is larger than all together is kept until the next comes.
    assert grammars.problem("// " + "x" * MAX_CHARACTERS + "\nstart: /a/") is None
    assert len(grammars._compiled) == 1
    assert grammars.problem(large[0]) is None
    assert list(grammars._compiled) == large[:1]


BYTES = Grammars(
    lambda: Vocabulary([*(bytes([i]) for i in range(256)), b"<call>", b"<end>"], {256, 257}, (257,))
)


@pytest.mark.parametrize(
    ("grammar", "answer", "fits"),
    [
        (text.of_schema(text.ANY_OBJECT), '{"a": [1, {"b": null}]}', True),
        (text.of_schema(text.ANY_OBJECT), "[1]", False),
        (text.of_schema(True), "[1]", True),
        (text.of_choice(["yes", 'no "way"']), 'no "way"', True),
        (text.of_grammar('root ::= "x" [0-9]+'), "x12", True),
        (text.of_grammar('root ::= (("a")*)+ ("b"{2})? "c"'), "aabbc", True),
        (text.of_grammar('root ::= x\nx ::= (x "a"* | "b"+)*'), "bba", True),
        (text.of_grammar("start: /[a-c]+/"), "abd", False),
        (text.of_schema({"const": json.loads('"\\u00e9"')}), '"é"', True),
    ],
)
def test_forms_of_grammars(grammar: str, answer: str, fits: bool) -> None:
    matcher = BYTES.matcher(grammar)
    assert (matcher.commit(list(answer.encode())) and matcher.complete) == fits


proposals = st.lists(st.integers(0, 40), unique=True, max_size=12).flatmap(
    lambda some: st.lists(st.floats(0.001, 1.0), min_size=len(some), max_size=len(some)).map(
        lambda weights: (
            some,
            sorted((math.log(w / (sum(weights) + 0.1)) for w in weights), reverse=True),
        )
    )
)


@given(proposals, st.sets(st.integers(0, 40), min_size=1), st.integers(1, 8))
def test_a_masked_proposal_is_allowed_and_a_distribution(
    proposal: tuple[list[int], list[float]], those: set[int], width: int
) -> None:
    found, log_probs = masked(proposal, sorted(those), width)
    assert set(found) <= those
    assert len(set(found)) == len(found) <= width
    assert list(log_probs) == sorted(log_probs, reverse=True)
    assert sum(map(math.exp, log_probs)) <= 1 + 1e-9
    if len(those) <= min(FEW, width):
        assert set(found) == those, "what is all that may follow is proposed"
        assert sum(map(math.exp, log_probs)) == pytest.approx(1)


def test_what_a_peer_has_compiled_and_this_node_cannot_ends_the_answer() -> None:
    """Its draft node reports it; a stage or token source that raised would end."""
    path = GRAMMARS.peers_matcher("root ::= [")
    assert path.allowed(()).tolist() == [EOS]
    assert path.allowed((1,)) is None
    assert not path.commit((1,))
    assert not path.complete
    without = Grammars(lambda: Vocabulary(SPELLED, (), ())).peers_matcher(LANGUAGES[0].grammar)
    assert without.allowed(()) is None


def test_a_source_survives_a_grammar_that_it_cannot_compile() -> None:
    source = ConstrainedSource(NGramSource(), lambda: GRAMMARS)
    job = Expand(SessionId(1), Version(0), 0, (1, 2), 2, 2, 4, prompt_length=1, grammar="[")
    grown = source.run(job)
    assert isinstance(grown, Expanded)
    assert grown.tokens == (EOS,)
