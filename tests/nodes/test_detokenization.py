"""Text comes in pieces whose sum is the decoded whole, and no piece ends inside a character."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tokenizers import pre_tokenizers

from asyncspec_nodes.serving.text import (
    CONTEXT,
    UNFINISHED,
    AnswerText,
    Detokenizer,
    Piece,
    answer_text,
)
from nodes.test_service import ASK
from nodes.toy_tokenizers import CODECS, Raw


def stream(
    codec: Raw, ids: Sequence[int], cuts: Sequence[int], after: Sequence[int] = ()
) -> list[str]:
    """The pieces for ``ids``, given in portions that end at ``cuts``."""
    detokenizer = Detokenizer(codec, after)
    ends = [*sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    starts = [0, *ends[:-1]]
    pieces = [detokenizer.push(ids[a:b]) for a, b in zip(starts, ends, strict=True)]
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("name", CODECS)
@given(data=st.data())
def test_pieces_add_up_to_the_whole(name: str, data: st.DataObject) -> None:
    codec = CODECS[name]
    token = st.integers(0, codec.tokenizer.get_vocab_size() - 1)
    ids = data.draw(st.lists(token, max_size=30))
    cuts = data.draw(st.lists(st.integers(0, 1000), max_size=30))
    assert "".join(stream(codec, ids, cuts)) == codec.decode(ids)


@pytest.mark.parametrize("name", CODECS)
@given(data=st.data())
def test_an_answer_is_what_it_adds_to_the_text_it_goes_on(name: str, data: st.DataObject) -> None:
    codec = CODECS[name]
    tokens = st.integers(0, codec.tokenizer.get_vocab_size() - 1)
    prompt = data.draw(st.lists(tokens, max_size=12))
    ids = data.draw(st.lists(tokens, max_size=20))
    cuts = data.draw(st.lists(st.integers(0, 1000), max_size=20))
    text = "".join(stream(codec, ids, cuts, prompt))
    # The answer may change the text of what ends the prompt.
    settled = [token for token in prompt if not codec.is_special(token)]
    while settled and codec.is_byte(settled[-1]):
        settled.pop()
    context = settled[-CONTEXT:]
    while context and (codec.is_byte(context[-1]) or codec.decode(context).endswith(UNFINISHED)):
        context.pop()
        settled.pop()
    if not context:
        assert text == codec.decode(ids)
    elif codec.decode(context).strip() and codec.decode(settled).strip():
        assert codec.decode(settled) + text == codec.decode([*settled, *ids])
        before, shown = codec.decode(prompt), [one for one in ids if not codec.is_special(one)]
        if not before.endswith(UNFINISHED) and not any(map(codec.is_byte, shown[:1])):
            assert before + text == codec.decode([*prompt, *ids])


LINE_ENDS = ["<0x0D>", "<0x0A>"] * CONTEXT


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        *(([], "d"), (["<s>"], "d"), (["a"], " d"), (["a", "<s>"], " d"), (["▁"], " d")),
        *((["a", "<0x0A>"], " d"), (["a", *LINE_ENDS, "<s>"], " d"), (["a", "<0xE4>"], " d")),
        (["a", "<0x0A>", UNFINISHED], " d"),
    ],
)
def test_an_answer_keeps_the_space_between_it_and_the_prompt(prompt: list[str], text: str) -> None:
    """Llama 2's decoder takes the space off the first word of a text."""
    codec = CODECS["byte fallback, strip"]
    prompt_ids, ids = ([named(codec, name) for name in names] for names in (prompt, ["▁d"]))
    assert stream(codec, ids, [0, 1], prompt_ids) == ["", text, "", ""]


class Templated(Raw):
    """With a chat template."""

    template = "{{ messages }}"


@pytest.mark.parametrize(
    ("options", "text"),
    [({}, "d"), ({"continue_final_message": True}, " d"), ({"continue_final_message": False}, "d")],
)
def test_an_answer_keeps_the_space_behind_the_message_that_it_continues(
    options: dict[str, bool], text: str
) -> None:
    codec = Templated(CODECS["byte fallback, strip"].tokenizer)
    messages = [{"role": "assistant", "content": "a"}]
    chat = json.dumps({"messages": messages, "tools": None, "options": options})
    answer = answer_text(codec, replace(ASK, chat=chat), [named(codec, "a")])  # type: ignore[arg-type]
    assert answer.push([named(codec, "▁d")]) == Piece(text, 1)


def test_a_stop_string_does_not_begin_in_the_prompt() -> None:
    codec = CODECS["byte fallback, strip"]
    answer = AnswerText(codec, ["a d", " d"], after=[named(codec, "a")])
    assert answer.push([named(codec, "bc"), named(codec, "▁d")]) == Piece("bc", 2, " d")
    answer = AnswerText(codec, ["a d"], after=[named(codec, "a")])
    assert answer.push([named(codec, "▁d")]) == Piece(" d", 1)


@pytest.mark.parametrize("first", ["<0x00>", "a", "▁"])
def test_a_special_token_does_not_end_a_run_of_bytes(first: str) -> None:
    codec = CODECS["byte fallback"]
    ids = [codec.tokenizer.token_to_id(name) for name in (first, "<s>", "<0x80>")]
    assert "".join(stream(codec, ids, range(4))) == codec.decode(ids)


@pytest.mark.parametrize("name", CODECS)
@given(data=st.data())
def test_real_text_never_shows_half_a_character(name: str, data: st.DataObject) -> None:
    codec = CODECS[name]
    text = data.draw(st.text("ab é世🙂\n", max_size=12))
    ids = [
        i
        for byte in text.encode()
        for i in (codec.tokenizer.token_to_id(f"<0x{byte:02X}>"),)
        if i is not None
    ] or codec.tokenizer.encode(byte_letters(text)).ids
    pieces = stream(codec, ids, range(len(ids)))
    assert not any(UNFINISHED in piece for piece in pieces)
    assert "".join(pieces) == codec.decode(ids)


def byte_letters(text: str) -> str:
    """``text`` in the letters that ByteLevel has for bytes."""
    return "".join(p for p, _ in pre_tokenizers.ByteLevel(False, False).pre_tokenize_str(text))


def test_text_streams_and_does_not_wait_for_the_end() -> None:
    codec = CODECS["byte level"]
    ids = codec.tokenizer.encode(byte_letters("one two three")).ids
    assert "".join(stream(codec, ids, range(len(ids)))[:-1]) == "one two three"


def test_a_tokenizer_that_reshapes_is_decoded_at_the_end() -> None:
    class Reshaping(Raw):
        decodes_as_whole = True

    codec = Reshaping(CODECS["byte level"].tokenizer)
    ids = codec.tokenizer.encode(byte_letters("one two")).ids
    assert stream(codec, ids, [3]) == ["", "", "one two"]


class Counting(Raw):
    """Counts what it is asked about."""

    def __init__(self, codec: Raw) -> None:
        super().__init__(codec.tokenizer)
        self.looks = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.looks += len(ids)
        return super().decode(ids)

    def is_byte(self, token: int) -> bool:
        self.looks += 1
        return super().is_byte(token)


def named(codec: Raw, name: str) -> int:
    token = codec.tokenizer.token_to_id(name)
    assert token is not None
    return token


@pytest.mark.parametrize(
    ("name", "token"),
    [("byte level", "<|end|>"), ("byte fallback", "<s>"), ("byte fallback", "<0x80>")],
)
def test_a_run_without_text_costs_no_more_the_longer_it_is(name: str, token: str) -> None:
    """A model that has said all, and is told to go on, may say nothing for thousands of tokens."""
    codec = Counting(CODECS[name])
    detokenizer = Detokenizer(codec)
    detokenizer.push([named(codec, "a")])
    run = [named(codec, token)]
    for _ in range(1000):
        detokenizer.push(run)
    assert codec.looks < 3000


def test_looking_for_stop_strings_in_a_run_without_text_costs_no_more_either() -> None:
    codec = Counting(CODECS["byte level"])
    text = AnswerText(codec, ("stop",))
    for _ in range(1000):
        text.push([named(codec, "<|end|>")])
    assert codec.looks < 3000
