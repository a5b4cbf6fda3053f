"""Messages survive the wire; whatever else comes is a ``RemoteProtocolError``."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec_protocol.codec import TensorSpec, decode, encode
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.messages import (
    Clock,
    Close,
    Closed,
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
from protocol.words import KINDS, messages, of_kind


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
        (Segment(0, 0, 0, (), ()), "1 to 4096 nodes"),
        (Segment(0, 0, 0, (1, 2), (0,)), "has a parent"),
        (Segment(0, 0, 0, (1, 2), (0, 0), (5,)), "has a token"),
        (Segment(0, 0, 0, (1, 1), (0, 0)), "stands once"),
        (Segment(0, 0, 0, (1,), (1,)), "older than its child"),
        (Segment(0, 0, 0, (1,), (-2,)), "older than its child"),
        (Segment(0, 0, -1, (1,), (0,)), "below 0"),
        (Segment(0, 0, 0, tuple(range(5000)), tuple(range(-1, 4999))), "1 to 4096 nodes"),
        (Verdict(0, 0, 0, (1, 2), (3,)), "one token per node"),
        (Verdict(0, 0, 0, (-1,), (3,)), "below 0"),
        (Verdict(0, 0, 0, (1,), (3,), pass_number=-1), "below 0"),
        (Segment(0, 0, 0, (1,), (0,), pass_number=-1), "below 0"),
        (Credit(5, 2, float("nan")), "finite"),
        (PruneIndices(0, 1, 0, (-1,), ()), "below 0"),
        (PruneIndices(0, 1, 0, tuple(range(20_000)), ()), "too many"),
        (Expand(0, 0, 0, (1,), -1, 0, 0), "below 0"),
        (Verdict(0, 0, 0, (1,), (2**31,)), "out of bounds"),
        (Segment(0, 0, 0, (1,), (0,), (2**63,)), "out of bounds"),
        (Heartbeat(float("nan")), "finite"),
        (Heartbeat(1.0, 0.0, float("inf")), "finite"),
        (Heartbeat(1.0, 0.0, -1e-9), "go back"),
        (PassTimes(1, (1.0,), (1.0,), -1e-9), "go back"),
        (PassTimes(1, (1.0,), (1.0,), float("nan")), "go back"),
        (Credit(-5), "below 0"),
        (Credit(1, 0, -1.0), "go back"),
        (Credit(2**53), "too large"),
        (Ready(1, True, -1), "below 0"),
        (Closed(0, 1, 2**64 - 1, 0, 0, 0.0, 0), "too large"),
        (Closed(0, 1, 0, 0, 0, 0.0, 2**64 - 1), "too large"),
        (Closed(0, 1, 0, 0, -1, 0.0, 0), "below 0"),
        (Closed(0, 1, 0, 0, 0, 1e308, 0), "go back"),
        (Closed(0, 1, 0, 0, 0, float("nan"), 0), "go back"),
        (Heartbeat(1e308), "go back"),
        (Clock(1e308), "finite"),
        (Clock(float("nan")), "finite"),
        (PassTimes(1, (0.5,), (1.0,)), "a row at least"),
        (PassTimes(1, (1.0,), (5e-324,)), "picosecond"),
        (PassTimes(1, (1.0,), (1e308,)), "go back"),
        (PassTimes(1, (float("inf"),), (1.0,)), "a row at least"),
        (Rates(0, 2**64 - 1), "too large"),
        (Rates(0, 1, 0.5, 1e308), "go back"),
        (Segment(0, 0, 0, (2**64 - 1,), (0,)), "too large"),
        (Segment(0, 0, 0, (1,), (0,), pass_number=2**64 - 1), "too large"),
        (Segment(0, 0, 0, (1,), (0,), stage_seconds=1e308), "go back"),
        (Verdict(0, 0, 2**64 - 1, (1,), (1,)), "too large"),
        (Verdict(0, 0, 0, (1,), (1,), token_log_probs=(float("-inf"),)), "finite"),
        (Expand(0, 0, 0, (1,), 2, 1024, 64, 1024), "candidates"),
        (Open(0, 1, 2**31 + 1, 0, 0.0, 0, 1.0), "tokens"),
        (Open(0, 1, 8, 0, 0.0, 0, 1.0, max_tree_nodes=8193), "0 to 8192"),
        (Expanded(0, 0, 0, (-1,), (1,), (0.5,)), "0 or less"),
        (Expanded(0, 0, 0, (-1,), (2**31,), (0.0,)), "out of bounds"),
        (Close(-7), ">= -1"),
        (Finished(0, "stop", "", {"rounds": float("inf")}), "finite"),
        (Open(0, 0, 9, 0, 0.0, 0, 1.0), "holds its prompt"),
        (Open(0, 9, 8, 0, 0.0, 0, 1.0), "holds its prompt"),
        (Open(0, 1, 8, 0, -1.0, 0, 1.0), "temperature"),
        (Open(0, 1, 8, 0, float("nan"), 0, 1.0), "temperature"),
        (Open(0, 1, 8, 0, 1.0, 0, 0.0), "share"),
        (Open(0, 1, 8, 0, 1.0, 0, 1.0, repetition_penalty=0.0), "is from 1e-06"),
        (Open(0, 1, 8, 0, 1.0, 0, 1.0, repetition_penalty=float("inf")), "is from 1e-06"),
        (Open(0, 1, 8, 0, 1.0, 0, 1.0, repetition_penalty=1e-320), "is from 1e-06"),
        (Open(0, 1, 8, 0, 1.0, 0, 1.0, presence_penalty=-2.5), "in -2..2"),
        (Open(0, 1, 8, 0, 1.0, 0, 1.0, frequency_penalty=float("nan")), "in -2..2"),
        (Open(0, 3, 8, 0, 1.0, 0, 1.0, resumed_tokens=3), "after the user's prompt"),
        (Open(0, 3, 8, 0, 1.0, 0, 1.0, resumed_tokens=-1), "after the user's prompt"),
        (Submit(0, "a", 1, 0, float("nan"), 0, 1.0), "finite"),
        (Open(0, 1, 8, 0, 1.0, 0, 1.0, features=(3, 2)), "ascending depths"),
        (Open(0, 1, 8, 0, 1.0, 0, 1.0, features=(2, 2)), "ascending depths"),
        (Open(0, 1, 8, 0, 1.0, 0, 1.0, features=(-1, 2)), "ascending depths"),
        (Open(0, 1, 8, 0, 1.0, 0, 1.0, features=(-2,)), "ascending depths"),
        (Open(0, 1, 8, 0, 1.0, 0, 1.0, features=tuple(range(65))), "at most 64"),
        (Segment(0, 0, 0, (1,), (0,), (), taps=-1), "at most 64"),
        (Segment(0, 0, 0, (1,), (0,), (), taps=65), "at most 64"),
        (Verdict(0, 0, 0, (), (), (1,)), "in a tensor"),
        (Verdict(0, 0, 0, (), (), (-1,)), "below 0"),
        (Verdict(0, 0, 0, (), (), (1, 1)), "featured once"),
        (Expanded(0, 0, 0, (0,), (1,), (0.0,)), "comes first"),
        (Expanded(0, 0, 0, (-1,), (1,), ()), "differ in length"),
        (Expanded(0, 0, 0, (-1,), (1,), (float("nan"),)), "finite"),
    ],
)
def test_what_types_cannot_say(message: Any, rule: str) -> None:
    with pytest.raises(RemoteProtocolError, match=rule):
        decode(encode(message))


@pytest.mark.parametrize(
    ("message", "tensor", "rule"),
    [
        (Credit(1), TensorSpec("float32", (1, 2)), "carry a tensor"),
        (Segment(0, 0, 0, (1,), (0,)), TensorSpec("complex64", (1, 2)), "unknown dtype"),
        (Segment(0, 0, 0, (1,), (0,)), TensorSpec("float32", (2, 2)), "a row per node"),
        (Segment(0, 0, 0, (1,), (0,)), TensorSpec("float32", (1, 0)), "not empty"),
        (Segment(0, 0, 0, (1,), (0,)), TensorSpec("float32", (1, -5)), "not empty"),
        (Segment(0, 0, 0, (1,), (0,)), TensorSpec("float32", (1,) * 5), "dimensions"),
        (Segment(0, 0, 0, (1,), (0,)), TensorSpec("float32", (1, 2**40)), "too large"),
        (Segment(0, 0, 0, (1,), (0,)), TensorSpec("float32", (1, 2, 4)), "its taps"),
        (Segment(0, 0, 0, (1,), (0,), (), 1), TensorSpec("float32", (1, 4)), "its taps"),
        (Segment(0, 0, 0, (1,), (0,), (), 1), TensorSpec("float32", (1, 3, 4)), "its taps"),
        (Verdict(0, 0, 0, (1,), (1,)), TensorSpec("float32", (1, 4)), "a row per feature"),
        (Verdict(0, 0, 0, (), (), (1,)), TensorSpec("float32", (2, 4)), "a row per feature"),
        (Verdict(0, 0, 0, (), (), (1,)), TensorSpec("float32", (1,)), "a row per feature"),
    ],
)
def test_what_a_tensor_may_be(message: Any, tensor: TensorSpec, rule: str) -> None:
    with pytest.raises(RemoteProtocolError, match=rule):
        decode(encode(message, tensor))
