"""Conversations as prompts, and tokens spelled, by real tokenizers."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models

from asyncspec.core.errors import UserError
from asyncspec.plugins.hf.checkpoint.tokenizer import HFTokenizer, load_tokenizer
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET, PLAIN, read_template
from asyncspec_nodes.http.api.answers import RequestContext
from asyncspec_nodes.http.api.chat import ChatRequest
from asyncspec_nodes.http.api.parameters import parse
from asyncspec_nodes.node.loading import _chat_facts
from asyncspec_nodes.plugins.dialects.anthropic import MessagesRequest
from asyncspec_nodes.serving.templates import facts_of
from asyncspec_nodes.serving.text import Detokenizer
from nodes.toy_tokenizers import CODECS

pytestmark = pytest.mark.torch

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'x' %}{{ raise_exception('no x') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
DEMO = load_tokenizer(BUNDLED_TARGET)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text(max_size=20)}
    ),
    min_size=1,
    max_size=4,
)


@pytest.fixture(scope="module")
def templated() -> list[HFTokenizer]:
    """With ``TEMPLATE`` as its own, and given from outside, where it stands in for its own."""
    theirs = transformers.AutoTokenizer.from_pretrained(str(BUNDLED_TARGET))
    theirs.chat_template = TEMPLATE
    return [HFTokenizer(theirs), load_tokenizer(BUNDLED_TARGET, TEMPLATE)]


@pytest.mark.slow
@given(messages)
def test_a_template_makes_what_transformers_makes_of_it(
    templated: list[HFTokenizer], said: list[dict[str, str]]
) -> None:
    theirs = templated[0]._tokenizer
    want = theirs.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
    for tokenizer in templated:
        assert tokenizer.render(json.dumps(said)) == tuple(want)


@pytest.mark.slow
def test_a_target_whose_template_takes_too_much_is_refused_in_one_line() -> None:
    bomb = load_tokenizer(BUNDLED_TARGET, "{{ (10 ** (10 ** 7)) % 7 }}")
    with pytest.raises(UserError, match=r"^some/target: the chat template .* processor time; give"):
        _chat_facts(bomb, "some/target")


def test_a_missing_template_is_reported() -> None:
    with pytest.raises(ValueError, match=r"has no chat template; .* --chat-template FILE"):
        DEMO.render('[{"role": "user", "content": "x"}]')


@pytest.mark.sampled(3)
@pytest.mark.parametrize("template", [TEMPLATE, "{{ nothing.at.all }}", "{% broken"])
def test_a_template_that_refuses(template: str) -> None:
    with pytest.raises(ValueError, match="the chat template refuses these messages: ") as caught:
        load_tokenizer(BUNDLED_TARGET, template).render('[{"role": "x", "content": "y"}]')
    assert "\n" not in str(caught.value)


def test_a_request_names_a_template_and_brings_none() -> None:
    said = [{"role": "user", "content": "y"}]
    chat = {"messages": said, "tools": None, "options": {"chat_template": "{{ 1 }}"}}
    with pytest.raises(
        ValueError, match=r"^the target has no chat template '\{\{ 1 \}\}'; there are"
    ):
        load_tokenizer(BUNDLED_TARGET, "{{ messages }}").prompt(json.dumps(chat))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokenize", True),
        ("padding", "max_length"),
        ("max_length", 10**9),
        ("tokenizer_kwargs", {"padding": "max_length"}),
        ("conversation", []),
    ],
)
def test_a_request_does_not_say_what_comes_of_the_text(name: str, value: object) -> None:
    said = [{"role": "user", "content": "y"}]
    chat = {"messages": said, "tools": None, "options": {name: value}}
    with pytest.raises(ValueError, match=f"^{name} is not an argument of chat templates"):
        load_tokenizer(BUNDLED_TARGET, TEMPLATE).render(json.dumps(chat))


def test_a_request_may_leave_out_the_beginning_of_the_answer() -> None:
    chat = {
        "messages": [{"role": "user", "content": "y"}],
        "tools": None,
        "options": {"add_generation_prompt": False, "enable_thinking": True},
    }
    assert "<assistant>" not in load_tokenizer(BUNDLED_TARGET, TEMPLATE).prompt(json.dumps(chat))


def test_calls_for_a_template_without_tools_whose_roles_alternate() -> None:
    """As Gemma 3's: what is of one role becomes one message, and no text is lost."""
    alternating = (
        "{% for m in messages %}"
        "{% if m.role != 'system' and (m.role == 'user') != (loop.index0 % 2 == 1) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    tokenizer = load_tokenizer(BUNDLED_TARGET, alternating)
    tools = [{"type": "function", "function": {"name": "f"}}]
    calls = [{"id": i, "type": "function", "function": {"name": "f"}} for i in "ab"]
    openai = {
        "tools": tools,
        "messages": [
            {"role": "user", "content": "x?"},
            {"role": "assistant", "content": "I look.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "a", "content": "1"},
            {"role": "tool", "tool_call_id": "b", "content": "2"},
        ],
    }
    used = [{"type": "tool_use", "id": i, "name": "f", "input": {}} for i in "ab"]
    results = [{"type": "tool_result", "tool_use_id": i, "content": n} for i, n in ("a1", "b2")]
    anthropic = {
        "max_tokens": 9,
        "tools": [{"name": "f"}],
        "messages": [
            {"role": "user", "content": "x?"},
            {"role": "assistant", "content": [{"type": "text", "text": "I look."}, *used]},
            {"role": "user", "content": [*results, {"type": "text", "text": "And?"}]},
        ],
    }
    bodies: list[tuple[type[ChatRequest | MessagesRequest], dict[str, Any]]]
    bodies = [(ChatRequest, openai), (MessagesRequest, anthropic)]
    for kind, body in bodies:
        request = parse(json.dumps(body).encode(), kind)
        submit = request.call(RequestContext(facts=facts_of(alternating))).submits[0]
        prompt = tokenizer.prompt(submit.chat)
        call = '{"name":"f","arguments":{}}'
        assert f"<user>x?<assistant>I look.\n[{call},{call}]<user>" in prompt
        more = "\nAnd?" if kind is MessagesRequest else ""
        assert prompt.endswith(f"<user>The call returned: 1\nThe call returned: 2{more}")


def test_the_plain_template() -> None:
    plain = load_tokenizer(BUNDLED_TARGET, read_template(PLAIN))
    chat = json.dumps([{"role": "user", "content": "Once upon"}, {"role": "user", "content": "a"}])
    assert plain.render(chat) == DEMO.encode("Once upon\na\n")


def test_template_files(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("é")
    assert read_template(str(file)) == "é"
    assert read_template(None) is None
    with pytest.raises(UserError, match="cannot read the chat template"):
        read_template(str(tmp_path / "none"))
    file.write_bytes(b"\xff")
    with pytest.raises(UserError, match="not UTF-8"):
        read_template(str(file))


@pytest.mark.parametrize("name", sorted(CODECS))
def test_a_thread_reads_a_long_text_meanwhile(name: str) -> None:
    """As it is read alone; and what others get meanwhile is theirs."""
    backend = Fast.from_str(CODECS[name].tokenizer.to_str())
    backend.enable_truncation(7)
    backend.enable_padding(length=9)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer = HFTokenizer(theirs)
    # Such settings are changed with the first text, which no thread may be in the middle of.
    assert theirs.backend_tokenizer.truncation is None
    assert theirs.backend_tokenizer.padding is None
    short, long = "d ab", "ab d é 世 " * 4_000
    ids = wrapped(name).encode(short)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(tokenizer.encode, long)
        while not reading.done():
            assert tokenizer.encode(short) == ids
            assert tokenizer.decode(ids) == wrapped(name).decode(ids)
    assert reading.result() == wrapped(name).encode(long)
    assert len(reading.result()) > 4_000


@given(st.text(max_size=40))
def test_spelled_tokens_are_the_text(text: str) -> None:
    ids = DEMO.encode(text)
    assert b"".join(map(DEMO.spell, ids[1:])).decode() == text
    assert DEMO.spell(ids[0]) == b"<|bos|>"


def wrapped(name: str) -> HFTokenizer:
    """One of ``CODECS`` as transformers loads it."""
    backend: Fast = CODECS[name].tokenizer
    return HFTokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=backend))


def check_spelling(name: str, tokenizer: HFTokenizer, ids: list[int]) -> None:
    text = b"".join(map(tokenizer.spell, ids)).decode(errors="replace")
    want = tokenizer.decode(ids)
    if "\N{REPLACEMENT CHARACTER}" not in text + want:
        # Llama 2's decoder takes one space off the beginning of a text, and no more.
        assert (text.removeprefix(" ") if "strip" in name else text) == want


@pytest.mark.parametrize("name", sorted(CODECS))
@given(data=st.data())
def test_kinds_of_tokenizers(name: str, data: st.DataObject) -> None:
    backend: Fast = CODECS[name].tokenizer
    tokenizer = wrapped(name)
    special = {i for i, added in backend.get_added_tokens_decoder().items() if added.special}
    plain = st.integers(0, backend.get_vocab_size() - 1).filter(lambda i: i not in special)
    check_spelling(name, tokenizer, data.draw(st.lists(plain, max_size=12)))
    for i in special:
        assert tokenizer.spell(i).decode() == backend.id_to_token(i)


FORCED = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"


@pytest.mark.parametrize("forced", [False, True])
def test_spaces_that_a_decoder_cleans_up(forced: bool) -> None:
    """Later tokens change the text of earlier ones."""
    vocab = {name: i for i, name in enumerate(("Ġ", "a", ".", "b"))}
    backend = Fast(models.BPE(vocab, []))
    backend.decoder = decoders.ByteLevel()
    settings = {"clean_up_tokenization_spaces": True, FORCED: forced}
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **settings)
    tokenizer, ids = HFTokenizer(theirs), [1, 0, 2, 0, 3]
    want = "a. b" if forced else "a . b"
    assert tokenizer.decode(ids) == want
    assert tokenizer.decodes_as_whole == forced
    answer = Detokenizer(tokenizer)
    assert "".join(answer.push([token]) for token in ids) + answer.finish() == want


@pytest.mark.parametrize("name", ["byte fallback", "byte fallback, strip"])
@pytest.mark.parametrize("spaces", ["<0x20> <0x20>", "▁ ▁", "▁▁", "▁d <0x20>", "<0x20> ▁d"])
def test_texts_that_begin_with_spaces(name: str, spaces: str) -> None:
    backend: Fast = CODECS[name].tokenizer
    check_spelling(name, wrapped(name), [backend.get_vocab()[x] for x in spaces.split()])
