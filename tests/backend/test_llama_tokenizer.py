"""Tokenizers of GGUF files: their text in pieces, tokens that end an answer, special tokens, chat
templates."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from asyncspec.constraint import text
from asyncspec.plugins.llama.backend import BACKEND
from asyncspec.plugins.llama.target import end_tokens
from asyncspec.plugins.llama.tokenizer import LlamaTokenizer
from asyncspec_nodes.chat.calls import Tool
from asyncspec_nodes.chat.harmony import call_grammar, in_final
from asyncspec_nodes.node.sources import grammars
from asyncspec_nodes.serving.syntax.families.harmony import HARMONY_MARKERS
from asyncspec_nodes.serving.text import AnswerText, Detokenizer
from backend.gguf_vocabularies import (
    BYTES,
    SENTENCEPIECE,
    TokenType,
    control,
    letters,
    normal,
    save_vocabulary,
)
from effort import QUIET

WORDS = normal(*map(letters, ("the", " '", "string", " is", " nice", " .", " 's", "世")))
HARMONY = control("<|endoftext|>", *sorted(HARMONY_MARKERS))
MIXED = [*BYTES, *WORDS, *HARMONY, ("<unused1>", TokenType.UNUSED)]

KINDS: dict[str, dict[str, Any]] = {
    "cleaned bytes": {"tokens": MIXED, "pre": "llama-bpe"},
    "bytes": {"tokens": MIXED, "pre": "qwen2"},
    "SentencePiece": {"tokens": SENTENCEPIECE, "pre": None},
    "SentencePiece, no space": {
        "tokens": SENTENCEPIECE,
        "pre": None,
        "keys": {"add_space_prefix": False},
    },
}
CLEANED = "cleaned bytes"
"""Of which llama.cpp deletes spaces before punctuation."""


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LlamaTokenizer]:
    folder = tmp_path_factory.mktemp("vocabularies")
    return {
        name: LlamaTokenizer(save_vocabulary(folder / f"{name}.gguf", **kind))
        for name, kind in KINDS.items()
    }


def named(name: str, *texts: str) -> list[int]:
    """Tokens by the texts that the file has."""
    all_texts = [text for text, _ in KINDS[name]["tokens"]]
    return [all_texts.index(text) for text in texts]


def streamed(tokenizer: LlamaTokenizer, ids: Sequence[int], after: Sequence[int] = ()) -> list[str]:
    """The pieces of tokens that come one by one."""
    detokenizer = Detokenizer(tokenizer, after)
    return [*(detokenizer.push((token,)) for token in ids), detokenizer.finish()]


def test_spaces_before_punctuation_stay(known: dict[str, LlamaTokenizer]) -> None:
    words = ("the", " '", "string", "'", " is", " nice", " .")
    ids = named(CLEANED, *map(letters, words))
    assert streamed(known[CLEANED], ids) == [*words, ""]


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
def test_pieces_add_up_to_the_whole(
    name: str, data: st.DataObject, known: dict[str, LlamaTokenizer]
) -> None:
    count = len(KINDS[name]["tokens"])
    # Words besides bytes; the last is none of the vocabulary.
    token = st.integers(0, count) | st.integers(256, count)
    ids = data.draw(st.lists(token, max_size=30))
    assert "".join(streamed(known[name], ids)) == known[name].decode(ids)


@pytest.mark.parametrize("name", sorted({*KINDS} - {CLEANED}))
@given(data=st.data())
def test_text_is_that_of_llama_cpp(
    name: str, data: st.DataObject, known: dict[str, LlamaTokenizer]
) -> None:
    """Where it cleans nothing; it has no text of special tokens, save of those of harmony."""
    tokens = KINDS[name]["tokens"]
    shown = [i for i, (text, _) in enumerate(tokens) if text not in HARMONY_MARKERS]
    tokenizer = known[name]
    ids = data.draw(st.lists(st.sampled_from(shown), max_size=30))
    # llama.cpp strips the space of the first token alone, special or not.
    while ids and tokenizer.is_special(ids[0]):
        del ids[0]
    buffer = ctypes.create_string_buffer(1000)
    found = tokenizer._bound.llama_detokenize(
        tokenizer._vocab, (ctypes.c_int32 * len(ids))(*ids), len(ids), buffer, 1000, False, False
    )
    assert tokenizer.decode(ids) == buffer.raw[:found].decode(errors="replace")


@pytest.mark.parametrize(
    ("after", "pieces"),
    [((), "d"), (("<s>",), "d"), (("a",), " d"), (("▁",), " d"), (("<unused0>",), " d")],
)
def test_an_answer_keeps_the_space_behind_its_prompt(
    after: tuple[str, ...], pieces: str, known: dict[str, LlamaTokenizer]
) -> None:
    name = "SentencePiece"
    found = streamed(known[name], named(name, "▁d"), named(name, *after))
    assert "".join(found) == pieces


def test_a_prompt_begins_behind_its_special_tokens(known: dict[str, LlamaTokenizer]) -> None:
    name = "SentencePiece"
    assert known[name].decode(named(name, "<s>", "▁d", "▁d")) == "d d"


@pytest.mark.parametrize(
    ("names", "keys", "begin"),
    [
        (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), {"add_bos_token": False}, ()),
        (("<x>", "<y>", "<z>"), {"fim_pre_token_id": 257, "add_bos_token": True}, (256,)),
        (("<x>", "<y>", "<z>"), {}, None),
    ],
)
def test_a_prompt_to_fill_in(
    tmp_path: Path,
    names: tuple[str, ...],
    keys: dict[str, Any],
    begin: tuple[int, ...] | None,
) -> None:
    if "fim_pre_token_id" in keys:
        keys = keys | {"fim_suf_token_id": 258, "fim_mid_token_id": 259, "bos_token_id": 256}
    tokens = [*BYTES, *control("<s>", *names)]
    tokenizer = LlamaTokenizer(save_vocabulary(tmp_path / "x.gguf", tokens, keys=keys))
    if begin is None:
        with pytest.raises(ValueError, match="no tokens for filling in"):
            tokenizer.infill("a", "b")
        return
    a, b = (tuple(text.encode()) for text in ("a", "b"))
    assert tokenizer.infill("a", "b") == (*begin, 257, *a, 258, *b, 259)
    assert tokenizer.infill("", "b") == (*begin, 257, 258, *b, 259)


# --- Special tokens.

CODE = (
    ("<|fim_pad|>", "<PAD>", "[PAD]"),
    ("<|fim_repo|>", "<|repo_name|>", "<reponame>"),
    ("<|file_sep|>",),
)
ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    *("<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>"),
    *("<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[", "<|plamo:eos|>"),
)
OTHERS = ("<|im_start|>", "<|channel|>", "<|message|>", "<s>", "word")
TYPES = (TokenType.NORMAL, TokenType.CONTROL, TokenType.USER_DEFINED)


@st.composite
def vocabularies(draw: st.DrawFn) -> tuple[list[tuple[str, TokenType]], dict[str, int]]:
    """Texts with types, and tokens that the file states, also some that there are not."""
    texts = [*draw(st.sets(st.sampled_from([*ENDS, *OTHERS]))), "other", "last"]
    # llama.cpp takes any one of several of a kind.
    texts += [text for kind in CODE for text in draw(st.sets(st.sampled_from(kind), max_size=1))]
    tokens = [(text, draw(st.sampled_from(TYPES))) for text in draw(st.permutations(texts))]
    token = st.integers(0, len(tokens))
    stated = draw(
        st.dictionaries(st.sampled_from(["eot", "eom", "fim_pad", "fim_rep", "fim_sep"]), token)
    )
    stated["eos"] = draw(st.integers(0, len(tokens) - 1))
    return tokens, stated


@settings(suppress_health_check=[*QUIET, HealthCheck.function_scoped_fixture])
@given(vocabularies())
@example((HARMONY, {"eos": 0}))
@example((control("<|end|>", "<|user|>", "<|endoftext|>"), {"eos": 2}))
@example((control("<|end|>", "<|flush|>", "<|calls|>"), {"eos": 0}))
@example((control("</s>", "<turn|>", "<|tool_response>"), {"eos": 1}))
@example((control("</s>", "<|plamo:eos|>"), {"eos": 1}))
def test_answers_end_where_llama_cpp_ends_them(
    tmp_path: Path, vocabulary: tuple[list[tuple[str, TokenType]], dict[str, int]]
) -> None:
    tokens, stated = vocabulary
    keys = {f"{kind}_token_id": token for kind, token in stated.items()}
    target = save_vocabulary(tmp_path / "model.gguf", tokens, keys=keys)
    tokenizer = LlamaTokenizer(target)
    own = [
        i for i in range(len(tokens)) if tokenizer._bound.llama_vocab_is_eog(tokenizer._vocab, i)
    ]
    assert list(end_tokens(target.model)) == own


def test_a_form_in_harmony_compiles(tmp_path: Path) -> None:
    tokens = [*BYTES, *HARMONY]
    end = tokens.index(*control("<|return|>"))
    target = save_vocabulary(tmp_path / "model.gguf", tokens, keys={"eos_token_id": end})
    known = grammars(BACKEND, target, LlamaTokenizer(target))
    schema = {"type": "object", "properties": {}}
    assert known.problem(in_final(text.of_schema(schema))) is None
    assert known.problem(call_grammar([Tool("add", "", schema)])) is None


def test_harmony_is_marked_once(known: dict[str, LlamaTokenizer]) -> None:
    marks = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")
    for name in (CLEANED, "bytes"):
        tokenizer, ids = known[name], named(name, *marks, "the", "<|call|>")
        assert all(map(tokenizer.is_special, named(name, *HARMONY_MARKERS)))
        answer = AnswerText(tokenizer, markers=HARMONY_MARKERS)
        assert answer.push(ids).text + answer.finish().text == "".join((*marks, "the", "<|call|>"))
        assert tokenizer.decode(ids) == "the"


# --- Chat templates.

TEMPLATE = (
    "{%- for message in messages %}{{ message.role }}: {% if message.role == 'assistant' %}"
    "{% generation %}{% set last = message.content %}{{ last }}{% endgeneration %}{{ last }}"
    "{% else %}{{ message.content | tojson }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if tools %}{{ tools | tojson(indent=1) }}{% endif %}{{ own }}"
    "{% if refused %}{{ raise_exception('no ' ~ refused) }}{% endif %}"
    "{% if dated %}{{ strftime_now('%%') }}{% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
MESSAGES = [{"role": "user", "content": "<é>"}, {"role": "assistant", "content": "Hi."}]


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> LlamaTokenizer:
    path = tmp_path_factory.mktemp("chat") / "model.gguf"
    return LlamaTokenizer(save_vocabulary(path, BYTES, keys={"eos_token_id": 0}), TEMPLATE)


def prompt(tokenizer: LlamaTokenizer, options: dict[str, Any], tools: Any = None) -> str:
    chat = {"messages": MESSAGES, "tools": tools, "options": options}
    return tokenizer.prompt(json.dumps(chat))


def test_templates_find_what_transformers_gives_them(chatty: LlamaTokenizer) -> None:
    said = 'user: "<é>"\nassistant: Hi.\n'
    assert prompt(chatty, {}) == f"{said}assistant:"
    assert prompt(chatty, {}, [{"a": "'"}]) == f'{said}[\n {{\n  "a": "\'"\n }}\n]assistant:'
    assert prompt(chatty, {"dated": True}) == f"{said}%assistant:"
    assert prompt(chatty, {"add_generation_prompt": False, "own": "&"}) == f"{said}&"
    with pytest.raises(ValueError, match="the chat template refuses these messages: no text"):
        prompt(chatty, {"refused": "text"})


@pytest.mark.parametrize(
    ("content", "end"), [("Hi.", "Hi."), ("Hi. ", "Hi. "), (" Hi", " Hi"), ("", "assistant: \n")]
)
def test_a_last_message_is_continued(content: str, end: str, chatty: LlamaTokenizer) -> None:
    """The prompt ends where it does, as transformers cuts it."""
    options = {"continue_final_message": True, "add_generation_prompt": False}
    messages = [MESSAGES[0], {"role": "assistant", "content": content}]
    said = chatty.prompt(json.dumps({"messages": messages, "tools": None, "options": options}))
    before = 'user: "<é>"\nassistant: '
    assert said.startswith(before)
    assert said.endswith(end)
    assert len(said) <= len(before) + len(content) + 1


@pytest.mark.parametrize(
    "name", ["messages", "tools", "eos_token", "raise_exception", "strftime_now"]
)
def test_options_do_not_replace_what_the_template_is_given(
    name: str, chatty: LlamaTokenizer
) -> None:
    with pytest.raises(ValueError, match=f"{name} is not an argument of chat templates"):
        prompt(chatty, {name: []})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@given(
    options=st.dictionaries(
        st.sampled_from(["own", "add_generation_prompt", "loop", "range", "self", "", "refused"])
        | st.text(max_size=5),
        JSON,
    )
)
def test_options_of_any_type_are_rendered_or_refused(
    options: dict[str, Any], chatty: LlamaTokenizer
) -> None:
    try:
        found = prompt(chatty, options)
    except ValueError as error:
        found = str(error)
    assert found.startswith(("user: ", "the chat template refuses these messages: "))
