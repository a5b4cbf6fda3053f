"""Answers in OpenAI's harmony format, however their text is cut; their grammars, with the special
tokens that they are made of; the text of those tokens."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from asyncspec.constraint import text
from asyncspec.constraint.grammar import Grammars, Vocabulary
from asyncspec_nodes.chat.calls import Call, Tool
from asyncspec_nodes.chat.harmony import HarmonyParser, call_grammar, in_final
from asyncspec_nodes.chat.stepwise import Part, WholeCalls
from asyncspec_nodes.serving.syntax.families.harmony import HARMONY_MARKERS
from asyncspec_nodes.serving.templates import ChatFacts, answer_markers, facts_of
from asyncspec_nodes.serving.text import AnswerText
from nodes.toy_tokenizers import Raw

TOOLS = (
    Tool("add", "", {"type": "object", "properties": {"a": {"type": "integer"}}}),
    Tool("say", "", {"type": "object", "properties": {"text": {"type": "string"}}}),
)
THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Hello.<|return|>"
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'


def taken(
    said: str, cuts: list[int], tools: tuple[Tool, ...] = TOOLS, *, parallel: bool = True
) -> tuple[str, str, list[Call]]:
    """Content, reasoning and calls of a text that comes in pieces."""
    parser = HarmonyParser(tools, parallel=parallel)
    edges = sorted({0, len(said), *(cut % (len(said) + 1) for cut in cuts)})
    parts = [part for a, b in pairwise(edges) for part in parser.feed(said[a:b])]
    joined = WholeCalls().joined([*parts, *parser.finish()])
    texts = [part for part in joined if isinstance(part, Part)]
    content, thought = (
        "".join(part.text for part in texts if part.kind == kind)
        for kind in ("content", "reasoning")
    )
    calls = [part for part in joined if isinstance(part, Call)]
    assert parser.calls == len(calls)
    return content, thought, calls


ADD = Call("add", '{"a": 1}')
EXAMPLES = [
    (FINAL, ("Hello.", "", [])),
    (THOUGHT + FINAL, ("Hello.", "hm", [])),
    (THOUGHT + THOUGHT + FINAL, ("Hello.", "hm\nhm", [])),
    (THOUGHT + CALL, ("", "hm", [ADD])),
    (CALL + "<|start|>assistant" + CALL, ("", "", [ADD, ADD])),
    (' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>', ("", "", [ADD])),
    ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + CALL,
     ("I look.", "", [ADD])),
    ("<|channel|>commentary to=functions.other<|message|>{}<|call|>", ("{}", "", [])),
    # Without the markers of an end, without a header, and cut short in either.
    ("<|channel|>analysis<|message|>hm<|channel|>final<|message|>Hello.", ("Hello.", "hm", [])),
    ("Hello.", ("Hello.", "", [])),
    (" to the point", (" to the point", "", [])),
    ("<|channel|>fin", ("", "", [])),
    ("<|chan", ("", "", [])),
    (THOUGHT + "<|channel|>final<|message|>Hel", ("Hel", "hm", [])),
    (CALL[:-10], ("", "", [Call("add", '{"a": ')])),
]  # fmt: skip


@pytest.mark.parametrize(("said", "want"), EXAMPLES)
@given(cuts=st.lists(st.integers(0, 200), max_size=6))
def test_an_answer_is_taken_apart_in_any_pieces(
    said: str, want: tuple[str, str, list[Call]], cuts: list[int]
) -> None:
    assert taken(said, cuts) == want


pieces = st.lists(
    st.sampled_from([*sorted(HARMONY_MARKERS), "final", "analysis", "x", "to=functions.add", "<"]),
    max_size=12,
).map("".join)


@given(pieces, st.lists(st.integers(0, 200), max_size=6), st.booleans())
def test_parts_do_not_depend_on_pieces(said: str, cuts: list[int], parallel: bool) -> None:
    whole = taken(said, [], parallel=parallel)
    assert taken(said, cuts, parallel=parallel) == whole
    assert parallel or len(whole[2]) <= 1


MARKERS = sorted(HARMONY_MARKERS)
SPELLED = [*(bytes([i]) for i in range(256)), *(marker.encode() for marker in MARKERS)]
ENDS = tuple(256 + MARKERS.index(f"<|{name}|>") for name in ("return", "call"))
GRAMMARS = Grammars(lambda: Vocabulary(SPELLED, set(range(256, len(SPELLED))), ENDS))


def admits(grammar: str, said: str) -> bool:
    """Whether an answer may be ``said``, special tokens as such, and then end."""
    matcher = GRAMMARS.matcher(grammar)
    tokens: list[int] = []
    while said:
        marker = next((m for m in MARKERS if said.startswith(m)), None)
        tokens += [256 + MARKERS.index(marker)] if marker else list(said[0].encode())
        said = said[len(marker or said[0]) :]
    return matcher.commit(tokens) and matcher.complete


def test_a_form_binds_the_final_message_alone() -> None:
    grammar = in_final(text.of_schema({"type": "object", "required": ["b"], "properties": {}}))
    for head in ("", THOUGHT, THOUGHT + THOUGHT):
        assert admits(grammar, head + '<|channel|>final<|message|>{"b": 1}')
        assert admits(grammar, head + '<|channel|>final <|constrain|>json<|message|>{"b": 1}')
        assert not admits(grammar, head + "<|channel|>final<|message|>{}")
    assert not admits(grammar, '{"b": 1}')
    assert not admits(grammar, THOUGHT)


def test_a_forced_call_is_one_call_behind_any_analysis() -> None:
    grammar = call_grammar(TOOLS)
    for head in ("", THOUGHT):
        assert admits(grammar, head + CALL.removesuffix("<|call|>"))
        assert not admits(grammar, head + FINAL.removesuffix("<|return|>"))
    assert not admits(grammar, CALL.removesuffix("<|call|>").replace("1", '"1"'))
    assert not admits(grammar, CALL.removesuffix("<|call|>").replace("add", "other"))


def test_the_template_says_that_answers_have_markers() -> None:
    template = "{%- for tool in tools %}{% endfor %}<|start|>assistant<|channel|>final<|message|>"
    facts = facts_of(template + "{{ reasoning_effort }}")
    assert facts == ChatFacts("harmony", True, "", ("reasoning_effort",))
    assert answer_markers(template) == HARMONY_MARKERS
    assert answer_markers("<|im_start|>") == frozenset()


class _Marked(Raw):
    def is_special(self, token: int) -> bool:
        return token >= len(WORDS)

    def spell(self, token: int) -> bytes:
        return (self.tokenizer.id_to_token(token) or "").encode()


WORDS = ["Hel", "lo", "ð", "Ł", "ĺ", "Ĥ", "final", "."]


def _marked() -> _Marked:
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(WORDS)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    special = [*MARKERS, "<|other|>"]
    tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in special])
    return _Marked(tokenizer)


CODEC = _marked()


@given(st.lists(st.integers(0, len(WORDS) + len(MARKERS)), max_size=20), st.data())
def test_markers_are_part_of_the_text_and_other_special_tokens_are_not(
    ids: list[int], data: st.DataObject
) -> None:
    want, run = "", list[int]()
    for token in [*ids, len(WORDS)]:
        if token < len(WORDS):
            run.append(token)
        elif (name := CODEC.spell(token).decode()) in HARMONY_MARKERS:
            want += CODEC.decode(run) + name
            run = []
    want = want.removesuffix(CODEC.spell(len(WORDS)).decode())
    answer = AnswerText(CODEC, markers=HARMONY_MARKERS)  # type: ignore[arg-type]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    found = "".join(answer.push(ids[a:b]).text for a, b in pairwise([0, *cuts, len(ids)]))
    assert found + answer.finish().text == want


def test_a_stop_string_may_be_a_marker() -> None:
    answer = AnswerText(CODEC, ["<|end|>"], markers=HARMONY_MARKERS)  # type: ignore[arg-type]
    end = len(WORDS) + MARKERS.index("<|end|>")
    piece = answer.push([0, 1, end, 0])
    assert (piece.text, piece.tokens, piece.stopped) == ("Hello", 3, True)


def test_arguments_are_passed_on_while_they_are_written() -> None:
    parser = HarmonyParser(TOOLS)
    place = CALL.index("1")
    assert [type(part).__name__ for part in parser.feed(CALL[:place])] == [
        "CallBegin",
        "CallArguments",
    ]
    rest = WholeCalls().joined(parser.feed(CALL[place:]))
    assert json.loads('{"a": ' + rest[0].arguments) == {"a": 1}  # type: ignore[union-attr]
