"""Messages survive the wire; whatever else comes is a ``RemoteProtocolError``."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec_protocol.base import TensorSpec
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.framing import decode, encode
from asyncspec_protocol.messages import (
    Clock,
    Close,
    Closed,
    Collect,
    Credit,
    Expand,
    Expanded,
    Finished,
    Heartbeat,
    Open,
    PassTimes,
    PruneIndices,
    Rates,
    Ready,
    Segment,
    Submit,
    Verdict,
)
from protocol.message_strategies import KINDS, messages, of_kind


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_message_survives(kind: type[Any]) -> None:
    @given(of_kind(kind))
    def survives(message: Any) -> None:
        assert decode(encode(message)).message == message

    survives()


@given(st.binary(max_size=200))
def test_garbage_is_the_peers_fault(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        decode(data)


@given(messages, st.data())
def test_a_damaged_header_is_a_message_or_the_peers_fault(message: Any, data: Any) -> None:
    encoded = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RemoteProtocolError):
        decode(bytes(encoded[: data.draw(st.integers(0, len(encoded)))]))


def test_lists_in_lists_in_lists_are_the_peers_fault() -> None:
    nested = b"\x91" * 100_000 + b"\x00"
    with pytest.raises(RemoteProtocolError):
        decode(b"\x92\x93\xa6credit\x05" + nested + b"\xc0")


def test_fields_of_a_later_version_are_skipped() -> None:
    """Append only: a newer peer's extra field does not stop an older node."""
    assert decode(msgspec.msgpack.encode([["credit", 5, 2, 0.0, "new"], None])).message == Credit(
        5, 2
    )


@pytest.mark.parametrize(
    ("message", "rule"),
    [
        (Segment(0, 0, 0, (), ()), "Expected array of length >= 1 - at $[0][4]"),
        (Segment(0, 0, 0, (1, 2), (0,)), "has a parent"),
        (Segment(0, 0, 0, (1, 2), (0, 0), (5,)), "has a token"),
        (Segment(0, 0, 0, (1, 1), (0, 0)), "the nodes of a segment are distinct"),
        (Segment(0, 0, 0, (1,), (1,)), "older than its child"),
        (Segment(0, 0, 0, (1,), (-2,)), "Expected int >= -1 - at $[0][5][0]"),
        (Segment(0, 0, -1, (1,), (0,)), "Expected int >= 0 - at $[0][3]"),
        (
            Segment(0, 0, 0, tuple(range(5000)), tuple(range(-1, 4999))),
            "Expected array of length <= 4096 - at $[0][4]",
        ),
        (Verdict(0, 0, 0, (1, 2), (3,)), "one token per node"),
        (Verdict(0, 0, 0, (-1,), (3,)), "below 0"),
        (Verdict(0, 0, 0, (1,), (3,), pass_number=-1), "Expected int >= 0 - at $[0][12]"),
        (Segment(0, 0, 0, (1,), (0,), pass_number=-1), "Expected int >= 0 - at $[0][11]"),
        (Credit(5, 2, float("nan")), "Expected float >= 0.0 - at $[0][3]"),
        (PruneIndices(0, 1, 0, (-1,), ()), "below 0"),
        (PruneIndices(0, 1, 0, tuple(range(20_000)), ()), "too many"),
        (Expand(0, 0, 0, (1,), -1, 0, 0), "Expected int >= 0 - at $[0][5]"),
        (Verdict(0, 0, 0, (1,), (2**31,)), "Expected int <= 2147483647 - at $[0][5][0]"),
        (Segment(0, 0, 0, (1,), (0,), (2**63,)), "Expected int <= 2147483647 - at $[0][6][0]"),
        (Heartbeat(float("nan")), "Expected float >= 0.0 - at $[0][1]"),
        (Heartbeat(1.0, 0.0, float("inf")), "Expected float <= 1000000000000.0 - at $[0][3]"),
        (Heartbeat(1.0, 0.0, -1e-9), "Expected float >= 0.0 - at $[0][3]"),
        (PassTimes(1, (1.0,), (1.0,), -1e-9), "Expected float >= 0.0 - at $[0][4]"),
        (PassTimes(1, (1.0,), (1.0,), float("nan")), "Expected float >= 0.0 - at $[0][4]"),
        (Credit(-5), "Expected int >= 0 - at $[0][1]"),
        (Credit(1, 0, -1.0), "Expected float >= 0.0 - at $[0][3]"),
        (Credit(2**53), "Expected int <= 9007199254740991 - at $[0][1]"),
        (Ready(1, True, -1), "Expected int >= 0 - at $[0][3]"),
        (Closed(0, 1, 2**64 - 1, 0, 0, 0.0, 0), "Expected int <= 9007199254740991 - at $[0][3]"),
        (Closed(0, 1, 0, 0, 0, 0.0, 2**64 - 1), "Expected int <= 9007199254740991 - at $[0][7]"),
        (Closed(0, 1, 0, 0, -1, 0.0, 0), "Expected int >= 0 - at $[0][5]"),
        (Closed(0, 1, 0, 0, 0, 1e308, 0), "Expected float <= 1000000000000.0 - at $[0][6]"),
        (Closed(0, 1, 0, 0, 0, float("nan"), 0), "Expected float >= 0.0 - at $[0][6]"),
        (Heartbeat(1e308), "Expected float <= 1000000000000.0 - at $[0][1]"),
        (Clock(1e308), "Expected float <= 1000000000000.0 - at $[0][1]"),
        (Clock(float("nan")), "Expected float >= 0.0 - at $[0][1]"),
        (PassTimes(1, (0.5,), (1.0,)), "Expected float >= 1.0 - at $[0][2][0]"),
        (PassTimes(1, (1.0,), (5e-324,)), "picosecond"),
        (PassTimes(1, (1.0,), (1e308,)), "Expected float <= 1000000000000.0 - at $[0][3][0]"),
        (
            PassTimes(1, (float("inf"),), (1.0,)),
            "Expected float <= 9007199254740991.0 - at $[0][2][0]",
        ),
        (Rates(0, 2**64 - 1), "Expected int <= 9007199254740991 - at $[0][2]"),
        (Rates(0, 1, 0.5, 1e308), "Expected float <= 1000000000000.0 - at $[0][4]"),
        (Segment(0, 0, 0, (2**64 - 1,), (0,)), "Expected int <= 9007199254740991 - at $[0][4][0]"),
        (
            Segment(0, 0, 0, (1,), (0,), pass_number=2**64 - 1),
            "Expected int <= 9007199254740991 - at $[0][11]",
        ),
        (
            Segment(0, 0, 0, (1,), (0,), stage_seconds=1e308),
            "Expected float <= 1000000000000.0 - at $[0][10]",
        ),
        (Verdict(0, 0, 2**64 - 1, (1,), (1,)), "Expected int <= 9007199254740991 - at $[0][3]"),
        (
            Verdict(0, 0, 0, (1,), (1,), token_log_probs=(float("-inf"),)),
            "Expected float >= -1.7976931348623157e+308 - at $[0][9][0]",
        ),
        (Expand(0, 0, 0, (1,), 2, 257, 64, 128), "candidates"),
        (Expand(0, 0, 0, (1,), 3, 1, 64, 4096), "expands at most 8192 nodes"),
        (Expand(0, 0, 0, (1,) * 4097, 0, 0, 0), "array of length <= 4096"),
        (Open(0, 1, 2**31 + 1, 0, 0.0, 0, 1.0), "Expected int <= 2147483648 - at $[0][3]"),
        (Open(0, 1, 8, 0, 0.0, 0, 1.0, max_tree_nodes=8193), "Expected int <= 8192 - at $[0][19]"),
        (Expanded(0, 0, 0, (-1,), (1,), (0.5,)), "Expected float <= 0.0 - at $[0][6][0]"),
        (Expanded(0, 0, 0, (-1,), (2**31,), (0.0,)), "Expected int <= 2147483647 - at $[0][5][0]"),
        (Close(-7), ">= -1"),
        (
            Finished(0, "stop", "", {"rounds": float("inf")}),
            "Expected float <= 1.7976931348623157e+308 - at $[0][4][...]",
        ),
        (Open(0, 0, 9, 0, 0.0, 0, 1.0), "Expected int >= 1 - at $[0][2]"),
        (Open(0, 9, 8, 0, 0.0, 0, 1.0), "holds its prompt"),
        (Open(0, 2, 8, 0, 0.0, 0, 1.0, common_prefix=1), "of an older session"),
        (Expand(0, 0, 0, (1,), 2, 2, 2, frontier=(-1, 0)), "a frontier is known"),
        (Open(0, 1, 8, 0, -1.0, 0, 1.0), "Expected float >= 0.0 - at $[0][5]"),
        (Open(0, 1, 8, 0, float("nan"), 0, 1.0), "Expected float >= 0.0 - at $[0][5]"),
        (Open(0, 1, 8, 0, 1.0, 0, 0.0), "Expected float > 0.0 - at $[0][7]"),
        (Open(0, 1, 8, 0, 1.0, 0, 1.0, 1.0), "Expected float < 1.0 - at $[0][8]"),
        (
            Open(0, 1, 8, 0, 1.0, 0, 1.0, repetition_penalty=0.0),
            "Expected float >= 1e-06 - at $[0][9]",
        ),
        (
            Open(0, 1, 8, 0, 1.0, 0, 1.0, repetition_penalty=float("inf")),
            "Expected float <= 1000000.0 - at $[0][9]",
        ),
        (
            Open(0, 1, 8, 0, 1.0, 0, 1.0, repetition_penalty=1e-320),
            "Expected float >= 1e-06 - at $[0][9]",
        ),
        (
            Open(0, 1, 8, 0, 1.0, 0, 1.0, presence_penalty=-2.5),
            "Expected float >= -2.0 - at $[0][10]",
        ),
        (
            Open(0, 1, 8, 0, 1.0, 0, 1.0, frequency_penalty=float("nan")),
            "Expected float >= -2.0 - at $[0][11]",
        ),
        (Open(0, 3, 8, 0, 1.0, 0, 1.0, resumed_tokens=3), "after the user's prompt"),
        (Collect(0, -1.0, True, mask="é" * 33), "a mask has at most 64 bytes"),
        (Collect(0, -1.0, True, mask="a" * 65), "length <= 64"),
        (Open(0, 3, 8, 0, 1.0, 0, 1.0, resumed_tokens=-1), "Expected int >= 0 - at $[0][12]"),
        (
            Submit(0, "a", 1, 0, float("nan"), 0, 1.0),
            "Expected float >= -1.7976931348623157e+308 - at $[0][5]",
        ),
        (Open(0, 1, 8, 0, 1.0, 0, 1.0, features=(3, 2)), "ascending depths"),
        (Open(0, 1, 8, 0, 1.0, 0, 1.0, features=(2, 2)), "ascending depths"),
        (Open(0, 1, 8, 0, 1.0, 0, 1.0, features=(-1, 2)), "ascending depths"),
        (Open(0, 1, 8, 0, 1.0, 0, 1.0, features=(-2,)), "ascending depths"),
        (
            Open(0, 1, 8, 0, 1.0, 0, 1.0, features=tuple(range(65))),
            "Expected array of length <= 64 - at $[0][13]",
        ),
        (Segment(0, 0, 0, (1,), (0,), (), aux_states=-1), "Expected int >= 0 - at $[0][7]"),
        (Segment(0, 0, 0, (1,), (0,), (), aux_states=65), "Expected int <= 64 - at $[0][7]"),
        (Verdict(0, 0, 0, (), (), (1,)), "in a tensor"),
        (Verdict(0, 0, 0, (), (), (-1,)), "below 0"),
        (Verdict(0, 0, 0, (), (), (1, 1)), "featured once"),
        (Expanded(0, 0, 0, (0,), (1,), (0.0,)), "comes first"),
        (Expanded(0, 0, 0, (-1,), (1,), ()), "differ in length"),
        (
            Expanded(0, 0, 0, (-1,), (1,), (float("nan"),)),
            "Expected float >= -1.7976931348623157e+308 - at $[0][6][0]",
        ),
    ],
)
def test_invalid_messages_are_refused(message: Any, rule: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode(encode(message))
    assert rule in str(caught.value).replace("`", "")


@pytest.mark.parametrize(
    ("message", "tensor", "rule"),
    [
        (Credit(1), TensorSpec("float32", (1, 2)), "not carry a tensor"),
        (Segment(0, 0, 0, (1,), (0,)), TensorSpec("complex64", (1, 2)), "unknown dtype"),
        (Segment(0, 0, 0, (1,), (0,)), TensorSpec("float32", (2, 2)), "a row per node"),
        (Segment(0, 0, 0, (1,), (0,)), TensorSpec("float32", (1, 0)), "not empty"),
        (Segment(0, 0, 0, (1,), (0,)), TensorSpec("float32", (1, -5)), "not empty"),
        (Segment(0, 0, 0, (1,), (0,)), TensorSpec("float32", (1,) * 5), "dimensions"),
        (Segment(0, 0, 0, (1,), (0,)), TensorSpec("float32", (1, 2**40)), "too large"),
        (Segment(0, 0, 0, (1,), (0,)), TensorSpec("float32", (1, 2, 4)), "its auxiliary states"),
        (
            Segment(0, 0, 0, (1,), (0,), (), 1),
            TensorSpec("float32", (1, 4)),
            "its auxiliary states",
        ),
        (
            Segment(0, 0, 0, (1,), (0,), (), 1),
            TensorSpec("float32", (1, 3, 4)),
            "its auxiliary states",
        ),
        (Verdict(0, 0, 0, (1,), (1,)), TensorSpec("float32", (1, 4)), "a row per feature"),
        (Verdict(0, 0, 0, (), (), (1,)), TensorSpec("float32", (2, 4)), "a row per feature"),
        (Verdict(0, 0, 0, (), (), (1,)), TensorSpec("float32", (1,)), "a row per feature"),
    ],
)
def test_invalid_tensors_are_refused(message: Any, tensor: TensorSpec, rule: str) -> None:
    with pytest.raises(RemoteProtocolError, match=rule):
        decode(encode(message, tensor))


@pytest.mark.parametrize("dimensions", [1, 2, 3, 4])
def test_a_tensor_may_have_four_dimensions(dimensions: int) -> None:
    TensorSpec("float32", (1,) * dimensions).check()
