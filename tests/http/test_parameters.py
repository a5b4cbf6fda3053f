"""Any body at all is a typed request or an error in the API's form, never anything else."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncspec.core.sampling import Defaults, Sampling
from asyncspec_nodes.http.api.answers import RequestContext
from asyncspec_nodes.http.api.chat import ChatRequest
from asyncspec_nodes.http.api.completions import CompletionRequest
from asyncspec_nodes.http.api.errors import ApiError, frame
from asyncspec_nodes.http.api.parameters import (
    IGNORED,
    NEUTRAL,
    CompletionParameters,
    parse,
    seed_of_choice,
)
from asyncspec_nodes.serving.requests import settings_problem, stop_problem
from asyncspec_protocol.framing import decode, encode
from effort import examples

KINDS: tuple[type[Any], ...] = (ChatRequest, CompletionRequest)
NAMES = sorted(
    {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, *IGNORED, *NEUTRAL}
)
OPTIONAL = [name for name in NAMES if name not in ("messages", "prompt")]


def any_value(floats: st.SearchStrategy[float]) -> st.SearchStrategy[Any]:
    numbers = st.one_of(st.integers(), st.integers(-3, 3), floats, st.just(2**63))
    return st.recursive(
        st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=8)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
        ),
        max_leaves=6,
    )


# What Python reads of a body: its JSON has infinities.
anything = any_value(st.floats(allow_nan=False))
finite = any_value(st.floats(allow_nan=False, allow_infinity=False))
messages = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "x"]),
            "content": st.one_of(
                st.text(max_size=5),
                st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text()})),
                anything,
            ),
        }
    ),
    max_size=3,
)
good: dict[str, st.SearchStrategy[Any]] = {
    "model": st.just("m"),
    "messages": messages,
    "prompt": st.one_of(st.text(), st.lists(st.text(), min_size=1), st.lists(st.integers(0, 9))),
    "stream": st.booleans(),
    "stream_options": st.just({"include_usage": True}),
    "n": st.integers(1, 4),
    "max_tokens": st.integers(1, 2**31),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": st.one_of(st.text(), st.lists(st.text(max_size=3), max_size=5)),
    "logprobs": st.one_of(st.booleans(), st.integers(0, 20)),
    "frequency_penalty": st.floats(-2, 2),
    "policy": st.sampled_from(["flowspec", "chunked", "best"]),
}
bodies = st.one_of(
    st.binary(max_size=40),
    anything.map(json.dumps).map(str.encode),
    st.fixed_dictionaries(
        {"messages": messages, "prompt": st.just("x")},
        optional={name: st.one_of(good.get(name, anything), anything) for name in OPTIONAL},
    )
    .map(json.dumps)
    .map(str.encode),
    st.fixed_dictionaries(
        {"messages": messages, "prompt": good["prompt"]},
        optional={name: good[name] for name in OPTIONAL if name in good},
    )
    .map(json.dumps)
    .map(str.encode),
)


def read(body: bytes, kind: type[CompletionParameters]) -> Any:
    """A request, understood, or the error."""
    try:
        return parse(body, kind).call(RequestContext(seed=5))  # type: ignore[attr-defined]
    except ApiError as error:
        return error


def without(body: bytes, name: str) -> bytes:
    """So that a body may be one of either kind."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if isinstance(fields, dict):
        fields.pop(name, None)
    return json.dumps(fields).encode()


@settings(max_examples=examples(600, quick=150))
@given(bodies)
def test_any_body_is_a_request_or_an_error(body: bytes) -> None:
    for kind, other in zip(KINDS, ("prompt", "messages"), strict=True):
        found = read(without(body, other), kind)
        if isinstance(found, ApiError):
            assert found.status == 400
            inner = found.body()["error"]
            assert inner["type"] == "invalid_request_error"
            assert inner["message"]
            json.loads(msgspec.json.encode(found.body()))
            continue
        assert found.submits
        for submit in found.submits:
            # What was let in is what the draft node takes, and can travel.
            assert settings_problem(submit.max_new_tokens, Sampling.of(submit)) is None
            assert stop_problem(submit.stop) is None
            assert decode(encode(submit)).message == submit


@given(st.sampled_from(NAMES), finite)
def test_unsupported_parameters_are_named(name: str, value: Any) -> None:
    ask = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    found = read(json.dumps({**ask, name: value}).encode(), ChatRequest)
    if name in IGNORED or (name in NEUTRAL and value is None):
        assert not isinstance(found, ApiError)
    elif name in NEUTRAL and not isinstance(found, ApiError):
        assert value in NEUTRAL[name]
    elif isinstance(found, ApiError) and found.param is not None:
        assert found.param.split("[")[0].split(".")[0] in (name, "stop", "messages")


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_neutral_values_are_let_through(name: str) -> None:
    ask = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    for value in (None, *NEUTRAL[name]):
        assert not isinstance(
            read(json.dumps({**ask, name: value}).encode(), ChatRequest), ApiError
        )
    wrong = read(json.dumps({**ask, name: {"x": 1}}).encode(), ChatRequest)
    assert isinstance(wrong, ApiError)
    assert (wrong.param, wrong.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"model": "\xff"}', "not valid JSON"),
        (rb'{"model": "\ud800", "messages": []}', "unpaired surrogate"),
        (rb'{"model": "\uDC00 and more text", "messages": []}', "unpaired surrogate"),
        (rb'{"model": "\ud83d\ud83d\ude00", "messages": []}', "unpaired surrogate"),
        (rb'{"model": "\\\ud800"}', "unpaired surrogate"),
        (rb'{"model": "\\ud800"', "truncated"),
        (rb'{"model": "\ud83d\ude00"', "truncated"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b'{"model": 1e999}', "not valid JSON"),
        (b'{"model": NaN}', "not valid JSON"),
        (b"{}", "missing parameter: messages"),
    ],
)
def test_invalid_requests_are_refused(body: bytes, says: str) -> None:
    found = read(body, ChatRequest)
    assert isinstance(found, ApiError)
    assert says in found.message


LEAST: dict[type[Any], dict[str, Any]] = {
    ChatRequest: {"messages": [{"role": "user", "content": "x"}]},
    CompletionRequest: {"prompt": "x"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_stop_string_is_not_an_empty_one(kind: type[CompletionParameters]) -> None:
    """As with vLLM: what would end every answer at once is a mistake."""
    for none in ("null", "[]"):
        body = json.dumps({**LEAST[kind], "stop": json.loads(none)}).encode()
        assert read(body, kind).submits[0].stop == ()
    for empty in ("", [""], ["x", ""]):
        found = read(json.dumps({**LEAST[kind], "stop": empty}).encode(), kind)
        assert isinstance(found, ApiError)
        assert found.param == "stop"
        assert "a stop string is empty" in found.message


INTEGERS: dict[type[Any], tuple[str, ...]] = {
    ChatRequest: ("max_tokens", "max_completion_tokens", "n", "seed", "top_k", "top_logprobs"),
    CompletionRequest: ("max_tokens", "n", "seed", "top_k", "logprobs"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_whole_numbers_may_be_written_as_fractions(kind: type[Any]) -> None:
    ask: dict[str, Any] = {"model": "m"}
    if kind is ChatRequest:
        ask |= {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
    else:
        ask |= {"prompt": "x", "min_tokens": 1.0}
    for name in INTEGERS[kind]:
        found = parse(json.dumps({**ask, name: 5.0}).encode(), kind)
        assert getattr(found, name) == 5
        assert type(getattr(found, name)) is int
        for wrong in (5.5, "5", 1e30, [5.0]):
            refused = read(json.dumps({**ask, name: wrong}).encode(), kind)
            assert isinstance(refused, ApiError)
            assert (refused.status, refused.param) == (400, name)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 127))
def test_seeds(seed: int, choice: int) -> None:
    found = seed_of_choice(seed, choice)
    assert 0 <= found < 2**63
    if choice == 0 and seed >= 0:
        assert found == seed


@given(finite)
def test_a_frame_is_one_event(value: Any) -> None:
    data = frame(value)
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert b"\n" not in data[:-2]
    assert b"\r" not in data
    assert json.loads(data[6:]) == value


def test_everything_of_the_sampling_settings_is_passed_on() -> None:
    ask = {
        "model": "m",
        "prompt": "x",
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "seed": 11,
        "repetition_penalty": 1.5,
        "presence_penalty": -1,
        "frequency_penalty": 2,
        "stop": "a",
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "policy": "chunked",
    }
    (submit,) = read(json.dumps(ask).encode(), CompletionRequest).submits
    assert Sampling.of(submit) == Sampling(0.5, 7, 0.25, 0.125, 11, 1.5, -1.0, 2.0)
    assert (submit.stop, submit.include_stop, submit.ignore_eos) == (("a",), True, True)
    assert submit.policy == "chunked"
    assert submit.max_new_tokens == 16
    assert submit.unset == ()
    (greedy,) = read(b'{"model":"m","prompt":"x","top_p":0}', CompletionRequest).submits
    assert (greedy.top_k, greedy.top_p) == (1, 1.0)
    (free,) = read(b'{"model":"m","prompt":"x","top_k":-1}', CompletionRequest).submits
    assert (free.top_k, "top_k" in free.unset) == (0, False)


def test_what_a_request_leaves_out_is_left_to_the_target() -> None:
    ask = {"model": "m", "prompt": "x"}
    (submit,) = read(json.dumps(ask).encode(), CompletionRequest).submits
    assert set(submit.unset) == set(Defaults.__struct_fields__)
    # Without recommendations of the target it is the API's own default.
    assert (submit.temperature, submit.top_p) == (1.0, 1.0)
    said = {"temperature": 1, "top_k": 0, "repetition_penalty": None, "top_p": 0.5}
    (submit,) = read(json.dumps({**ask, **said}).encode(), CompletionRequest).submits
    assert set(submit.unset) == {"min_p", "repetition_penalty"}
    # No recommendation may take back that this is greedy.
    (greedy,) = read(json.dumps({**ask, "top_p": 0}).encode(), CompletionRequest).submits
    assert set(greedy.unset) == {"temperature", "min_p", "repetition_penalty"}
