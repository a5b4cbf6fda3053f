"""Arguments that are nearly JSON become JSON; what is JSON stays as it is written."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec_nodes.chat.arguments import Arguments, ObjectArguments
from asyncspec_nodes.chat.pythonic import PythonArguments
from asyncspec_nodes.chat.tagged import TaggedArguments
from asyncspec_nodes.serving.syntax.table import Tags

cuts = st.lists(st.integers(0, 200), max_size=5)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
objects = st.dictionaries(st.text(max_size=5), values, max_size=4)


def read(reader: Arguments, text: str, cuts: list[int]) -> tuple[str, str]:
    """Arguments of a text that comes in pieces and then ends, and what is behind them."""
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    written = rest = ""
    for a, b in pairwise(edges):
        more, rest, ended = reader.feed(rest + text[a:b])
        written += more
        if ended:
            return written, rest + text[b:]
    more, rest = reader.close(rest)
    return written + more, rest


@given(objects, st.sampled_from([None, 1]), st.booleans(), cuts)
def test_json_stays_as_it_is_written(
    value: dict[str, object], indent: int | None, ascii_only: bool, cuts: list[int]
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert read(ObjectArguments(), text + "}<", cuts) == (text, "}<")


@given(objects, st.integers(0, 400), cuts)
def test_json_that_ends_too_early_is_completed(
    value: dict[str, object], end: int, cuts: list[int]
) -> None:
    text = json.dumps(value)[:end]
    assert isinstance(json.loads(read(ObjectArguments(), text, cuts)[0]), dict)


nearly = st.lists(
    st.sampled_from(
        [
            *"{}[],:\"'a1 \n\\<\x00",
            *("\\u12", "True", "null", '"a"', "'b'", '<|"|>', "<escape>", "-1.5e3"),
        ]
    ),
    max_size=14,
).map("".join)


@given(nearly, cuts)
def test_anything_becomes_json_in_any_pieces(text: str, cuts: list[int]) -> None:
    found = read(ObjectArguments(), text, cuts)
    json.loads(found[0])
    assert found == read(ObjectArguments(), text, [])


REPAIRS = [
    ("null", {}),
    ("None", {}),
    ('""', {}),
    ('" "', {}),
    ("[]", {}),
    ("", {}),
    ('"{\\"a\\": 1}"', {"a": 1}),
    ("{'a': 'it\\'s', 'b': True, 'c': None}", {"a": "it's", "b": True, "c": None}),
    ('{"a": "say "}', {"a": "say "}),
    ('{"a": 1,}', {"a": 1}),
    ('{"a": [1, 2,], }', {"a": [1, 2]}),
    ('{,"a": 1,, "b": 2}', {"a": 1, "b": 2}),
    ('{"a": 1 "b": 2}', {"a": 1, "b": 2}),
    ("{a: 1, b: plain text}", {"a": 1, "b": "plain text"}),
    ('{"a": "two\nlines\t"}', {"a": "two\nlines\t"}),
    ('{"a": "\\d+"}', {"a": "\\d+"}),
    ('{{"a": 1}}', {"a": 1}),
    ('{"a": [1, {"b": 2}', {"a": [1, {"b": 2}]}),
    ('{"a": [1, 2}', {"a": [1, 2]}),
    ('{"a": "open', {"a": "open"}),
    ('{"a": ', {"a": None}),
    ('{"a"', {"a": None}),
    ('{"a": tru', {"a": "tru"}),
    ('{"a": 1]', {"a": 1}),
    ('{"a": 007}', {"a": "007"}),
]


@pytest.mark.parametrize(("text", "value"), REPAIRS)
@given(cuts=cuts)
def test_what_is_nearly_json_is_repaired(text: str, value: object, cuts: list[int]) -> None:
    assert json.loads(read(ObjectArguments(), text, cuts)[0]) == value


PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}, "now": {"type": "boolean"}}


@pytest.mark.parametrize(
    ("text", "value", "behind"),
    [
        ("city='Paris', days=2)!", {"city": "Paris", "days": 2}, "!"),
        ('city="a, b) c", now=True)', {"city": "a, b) c", "now": True}, ""),
        ("'Paris', 2)", {"city": "Paris", "days": 2}, ""),
        ('city="\\u00e9 \\ud83d\\ude00", days=[1, {"a": (2, None)}])',
         {"city": "é 😀", "days": [1, {"a": [2, None]}]}, ""),
        ("city=Paris, now=true)", {"city": "Paris", "now": True}, ""),
        ("city='it\\'s')", {"city": "it's"}, ""),
        ("city='Paris', city='Rome')", {"city": "Paris"}, ""),
        (")", {}, ""),
        ("city='Par", {"city": "Par"}, ""),
        ("days=" + 500 * "[", {"days": 500 * "["}, ""),
    ],
)  # fmt: skip
@given(cuts=cuts)
def test_arguments_as_python_writes_them(
    text: str, value: object, behind: str, cuts: list[int]
) -> None:
    found, rest = read(PythonArguments(PROPERTIES), text, cuts)
    assert (json.loads(found), rest) == (value, behind)


TAGGED = [
    ("<parameter=city>\nParis\n</parameter>\n</function>", {"city": "Paris"}),
    ("<parameter=city>\nParis\n<parameter=days>\n3\n</function>", {"city": "Paris", "days": 3}),
    ("<parameter=city>\nParis\n</function>\n</tool_call>", {"city": "Paris"}),
    ("<parameter=city>\nParis\n</tool_call>", {"city": "Paris"}),
    ("<parameter=city>\nParis\n</parameter>\n</tool_call>", {"city": "Paris"}),
    ("<parameter=city>\nParis", {"city": "Paris"}),
    ("<parameter=now>\nTrue\n</parameter>", {"now": True}),
    ("</function>", {}),
    ("</tool_call>", {}),
    ("", {}),
    ('<parameter name="city">Paris</parameter></function>', {"city": "Paris"}),
    # The first of two counts, and what only looks like an end stays in the value.
    ("<parameter=city>a</parameter><parameter=city>b</parameter></function>", {"city": "a"}),
    ("<parameter=city>x </function> y\n</tool_call> z</parameter></function>",
     {"city": "x </function> y\n</tool_call> z"}),
    ("<parameter=city><parameter=none>x</parameter></function>", {"city": "<parameter=none>x"}),
    # The next call begins.
    ("<parameter=city>\nParis\n</tool_call>\n<tool_call>\n<function=f>", {"city": "Paris"}),
    ("<parameter=city>\nParis\n</parameter>\n<tool_call>\n<function=f>", {"city": "Paris"}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), TAGGED)
@given(cuts=cuts)
def test_tags_may_be_left_out(text: str, value: object, cuts: list[int]) -> None:
    found, _ = read(TaggedArguments(Tags(padded=True), PROPERTIES), text, cuts)
    assert json.loads(found) == value


tags = st.lists(
    st.sampled_from(
        [
            *("<parameter=city>", "<parameter=days>", "</parameter>", "</function>"),
            *("</tool_call>", "<tool_call>", "<function=f>", "\n", "x", " ", "<", "3", "</"),
        ]
    ),
    max_size=12,
).map("".join)


@given(tags, cuts)
def test_any_tags_become_json_in_any_pieces(text: str, cuts: list[int]) -> None:
    def of(cuts: list[int]) -> str:
        return read(TaggedArguments(Tags(padded=True), PROPERTIES), text, cuts)[0]

    json.loads(of([]))
    assert of(cuts) == of([])
