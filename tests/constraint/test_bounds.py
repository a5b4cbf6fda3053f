"""Strangers' grammars: refused in one line by what they cost, and never the end of a process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance.gbnf_to_lark import any_to_lark
from msgspec.structs import replace

from asyncspec.constraint import bounds, text
from asyncspec.constraint import grammar as grammars
from asyncspec.constraint.grammar import Grammars, Vocabulary
from asyncspec.constraint.worker import BoundError, Limits, Worker


def vocabulary() -> Vocabulary:
    return Vocabulary([*(bytes([i]) for i in range(256)), b"<end>"], {256}, (256,))


def patient() -> Grammars:
    """Those that other bounds end than that of processor time, which a slow machine meets first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammars, "LIMITS", replace(grammars.LIMITS, seconds=60.0))
        return Grammars(vocabulary, bounded=True)


BOUNDED = Grammars(vocabulary, bounded=True)
PATIENT = patient()
PLAIN = Grammars(vocabulary)


def chain(links: int) -> dict[str, Any]:
    """A schema whose every definition is an object with the next."""
    inner = {
        f"a{i}": {
            "type": "object",
            "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}},
            "required": ["x"],
        }
        for i in range(links)
    }
    return {"$ref": "#/$defs/a0", "$defs": {**inner, f"a{links}": {"type": "integer"}}}


def all_of(links: int) -> dict[str, Any]:
    inner = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}]} for i in range(links)}
    return {"$ref": "#/$defs/a0", "$defs": {**inner, f"a{links}": {"type": "integer"}}}


def rules(count: int) -> str:
    lines = [f'r{i}: "a" r{i + 1}' for i in range(count)]
    return "\n".join(["start: r0", *lines, f'r{count}: "b"'])


def gbnf_rules(count: int) -> str:
    lines = [f'r{i} ::= "a" r{i + 1}' for i in range(count)]
    return "\n".join([*lines, f'r{count} ::= "b"', "root ::= r0"])


def nested(levels: int) -> object:
    schema: dict[str, object] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: text.of_schema(chain(2000)), "more than 1000 definitions"),
        (lambda: text.of_schema(all_of(2000)), "more than 1000 definitions"),
        (lambda: text.of_schema(nested(10_000)), "at most 100 levels"),  # type: ignore[arg-type]
        (lambda: text.of_choice(["word" * 70_000]), "at most 262144"),
        (lambda: text.of_grammar(rules(2000)), "2002 rules; at most 1000"),
        (lambda: text.of_grammar(gbnf_rules(2000)), "2002 rules; at most 1000"),
        (lambda: text.of_grammar("root ::= " + '"ab" ' * 10_000), "at most 32768 are converted"),
        (lambda: text.of_grammar('root ::= "a"{1,99999}'), "more often than 10000 times"),
        (lambda: text.of_regex("(" * 5000 + "a" + ")" * 5000), "at most 100 parentheses"),
    ],
)
def test_what_is_too_large_is_refused_before_it_is_compiled(
    make: Callable[[], str], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        make()


def test_of_a_schema_that_is_too_long_nothing_else_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at: list[object] = []
    monkeypatch.setattr(text, "enforced", looked_at.append)
    monkeypatch.setattr(bounds, "by_level", looked_at.append)
    with pytest.raises(ValueError, match="at most 262144"):
        text.of_schema({"enum": [[]] * 100_000})
    assert not looked_at


@pytest.mark.parametrize(
    "hostile",
    ["[", "{ ", "{" + " " * 999, '"\\', "#", "a", "\n", " ", "start", "start\n", "[\\", "(", "\\"],
)
def test_checks_look_at_each_character_a_fixed_number_of_times(hostile: str) -> None:
    """Quadratic ones would not end."""
    with pytest.raises(ValueError):
        text.of_grammar(hostile * (bounds.MAX_BYTES // len(hostile)))


def test_literals_and_classes_are_no_structure() -> None:
    bounds.check_text('root ::= "' + "(" * 500 + '{99999}" [' + "(" * 500 + "] " + "\\(" * 500)


@pytest.mark.parametrize(
    ("hostile", "reason"),
    [
        (text.of_schema(chain(900)), "nested too deeply: more than 1024 KiB of stack"),
        (text.of_schema(all_of(900)), "nested too deeply: more than 1024 KiB of stack"),
        (rules(9000), "nested too deeply: more than 1024 KiB of stack"),
        ("start: " + " | ".join(f'"w{i}x"' for i in range(20_000)), "0.25 s of processor time"),
    ],
)
def test_what_ends_a_compiler_ends_another_process_and_the_next_one_is_served(
    hostile: str, reason: str
) -> None:
    bounded = PATIENT if "stack" in reason else BOUNDED
    assert reason in str(bounded.problem(hostile))
    assert bounded.problem(text.of_schema(chain(20))) is None
    # What is refused is not tried again where it is short enough to be remembered.
    assert reason in str(bounded.problem(hostile))


def test_a_worker_that_is_killed_is_started_again() -> None:
    assert BOUNDED.problem('start: "a"') is None
    worker = BOUNDED._worker
    assert worker is not None
    process = worker._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert BOUNDED.problem('start: "b"') is None
    worker.close()
    assert BOUNDED.problem('start: "c"') is None


STRANGER = """
import os, signal
def make(argument):
    def work(message):
        kind, _, size = message.partition(b" ")
        if kind == b"takes":
            return b"%d" % len(bytearray(int(size)))
        if kind == b"loops":
            while True:
                pass
        if kind == b"dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        if kind == b"raises":
            raise ValueError("not so")
        return argument + message
    return work
"""


@pytest.fixture(params=[True, False], ids=["forks", "spawns"])
def stranger(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Worker]:
    (tmp_path / "strangers_work.py").write_text(STRANGER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    limits = Limits(seconds=0.5, mebibytes=64)
    worker = Worker("strangers_work:make", lambda: b"said ", limits, forks=request.param)
    yield worker
    worker.close()


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"takes %d" % (1 << 30), "more than 64 MiB of memory"),
        (b"loops", "more than 0.5 s of processor time"),
        (b"dies", "more than 1024 KiB of stack"),
    ],
)
def test_work_is_bounded_and_goes_on(message: bytes, reason: str, stranger: Worker) -> None:
    assert stranger(b"a") == b"said a"
    for _ in range(2):
        with pytest.raises(BoundError, match=reason):
            stranger(message)
        assert stranger(b"takes 1000") == b"1000"
    with pytest.raises(ValueError, match=r"^not so$"):
        stranger(b"raises")


@pytest.mark.parametrize(
    "source",
    [
        'root ::= "x" [0-9]+',
        'root ::= a b\na ::= "x" # says "more"\nb ::= a? [#"] "#"',
        'root ::= expr\nexpr ::= term ("+" term)*\nterm ::= [0-9]+ | "(" expr ")"',
        "root ::= fooBar{2,3}\nfooBar ::= digit\ndigit ::= [0-9]",
    ],
)
def test_converted_grammars_are_those_of_llguidance(source: str) -> None:
    lines = [line for line in any_to_lark(source).splitlines() if not line.startswith("//")]
    ours = text.of_grammar(source).split()
    assert ours == "\n".join(lines).removeprefix("%llguidance {}").split()


names = st.sampled_from(["a", "b", "c"])
leaves = st.sampled_from([{"type": "integer"}, {"type": "string"}, {"$ref": "#/$defs/a"}, True])
schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(lambda one: {"type": "array", "items": one}, inner),
        st.dictionaries(names, inner, max_size=3).map(
            lambda members: {"type": "object", "properties": members, "required": [*members]}
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some}),
        st.lists(inner, min_size=1, max_size=2).map(lambda some: {"allOf": some}),
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=60)
@given(schemas, st.integers(0, 40))
def test_schemas_within_the_bounds_are_answered_as_without_a_worker(
    schema: Any, levels: int
) -> None:
    for _ in range(levels):
        schema = {"type": "array", "items": schema, "maxItems": 2}
    if isinstance(schema, dict):
        schema = {**schema, "$defs": {"a": {"type": "null"}}}
    grammar = text.of_schema(schema)
    assert PATIENT.problem(grammar) == PLAIN.problem(grammar)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 200), st.integers(0, 1200), st.integers(0, 300_000))
def test_a_schema_is_refused_by_its_bounds_alone(levels: int, members: int, size: int) -> None:
    schema: Any = {"$defs": {f"d{i}": True for i in range(members)}, "description": "x" * size}
    for _ in range(levels):
        schema = {"items": schema}
    fits = levels + 2 <= bounds.MAX_LEVELS and members <= bounds.MAX_DEFINITIONS
    if size > bounds.MAX_BYTES or not (fits or (not members and levels + 1 < bounds.MAX_LEVELS)):
        with pytest.raises(ValueError, match=r"at most|which is the most"):
            text.of_schema(schema)
    elif size < bounds.MAX_BYTES // 2:
        text.of_schema(schema)


@pytest.mark.nightly
@settings(deadline=None, max_examples=300, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from([chain, all_of, rules, gbnf_rules, nested]),
    st.integers(1, 20_000),
    st.text(alphabet='ab"[]{}()|:=*+?,\\#/\n 019', max_size=200),
    st.integers(1, 1 << 20),
)
def test_grammars_of_any_size_end_nothing(
    make: Callable[[int], Any], size: int, noise: str, length: int
) -> None:
    """Up to 1 MB, structured and not."""
    for source in (make(size), noise * (length // max(1, len(noise)))):
        for form in (text.of_schema, text.of_grammar, text.of_regex):
            if (form is text.of_schema) != isinstance(source, dict):
                continue
            try:
                grammar = form(source)
            except ValueError:
                continue
            BOUNDED.problem(grammar)
    assert BOUNDED.problem('start: "a"') is None
