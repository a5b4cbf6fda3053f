"""Recordings without what users ask and are told."""

from __future__ import annotations

import itertools
import typing
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.trace.masking import Mask
from asyncspec.trace.records import JobResult, Step
from asyncspec_protocol.clients import MAX_MASK_BYTES, ClientMessage
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.framing import decode, encode
from asyncspec_protocol.ids import NodeId, SegmentId, SessionId, Version
from asyncspec_protocol.messages import Collect, Expanded, Message, PromptLogprobs, Segment, Verdict
from asyncspec_protocol.sampling import UNCONSTRAINED
from protocol.message_strategies import KINDS, of_kind

OF_NODES = st.one_of(*(of_kind(k) for k in KINDS if k not in typing.get_args(ClientMessage)))
NODES = (NodeId(1), NodeId(2))
HASHED = {Segment: "tokens", Verdict: "tokens"}


@given(OF_NODES, st.binary(min_size=1, max_size=64))
@example(Segment(SessionId(0), SegmentId(0), Version(0), NODES, (-1, 0), scored_tokens=(7,)), b"a")
def test_no_message_keeps_a_token(message: Message, key: bytes) -> None:
    """By the types of its fields, so that a field of tokens to come is hidden, too."""
    masked: Any = Mask(key).message(message)
    for name, kind in type(message).__annotations__.items():
        value, hidden = getattr(message, name), getattr(masked, name)
        if "Token" in str(kind) or name == "committed":
            assert len(hidden) == len(value)
            if HASHED.get(type(message)) == name:
                assert len(set(hidden)) == len(set(value))
            else:
                assert set(hidden) <= {0}
        elif "LogProb" in str(kind):
            # A guess at the text can be tried against them, as the model is known.
            assert hidden == (0,) * len(value)
        elif isinstance(value, PromptLogprobs):
            likeliest = (0,) * len(value.top_tokens)
            scores, ranks = (0,) * len(value.log_probs), (1,) * len(value.ranks)
            assert hidden == PromptLogprobs(scores, ranks, likeliest, likeliest)
        elif name == "constraint":
            assert hidden == UNCONSTRAINED
        elif name in ("grammar", "stored_as"):
            assert not hidden
        else:
            assert hidden == value


def test_no_result_of_a_job_keeps_a_token() -> None:
    tree = Expanded(SessionId(0), Version(0), 3, (-1, 0), (7, 8), (-0.5, -1.5))
    drawn = JobResult(
        0, 1.0, tokens=(7, 8), top_tokens=(((7,), (-0.5,)),) * 2, token_log_probs=(-0.5, -1.5)
    )
    grown = JobResult(0, 1.0, expanded=tree)
    line = Mask(b"a").line(Step(0, 0, 0.0, 1.0, JobResult(0, 1.0, parts=(drawn, grown))))
    assert isinstance(line, Step)
    assert isinstance(line.input, JobResult)
    assert line.input.parts == (
        replace(drawn, tokens=(0, 0), top_tokens=(((0,), (0,)),) * 2, token_log_probs=(0, 0)),
        replace(grown, expanded=replace(tree, tokens=(0, 0), scores=(0, 0))),
    )


@given(st.text(max_size=70))
@example("é" * 64)
def test_every_mask_that_may_be_sent_hides_tokens(mask: str) -> None:
    """Whatever letters a draft node writes it in."""
    try:
        message = decode(encode(Collect(0, -1.0, True, mask=mask))).message
    except RemoteProtocolError:
        assert len(mask.encode()) > MAX_MASK_BYTES
        return
    assert isinstance(message, Collect)
    segment = Segment(SessionId(0), SegmentId(0), Version(0), NODES, (-1, 0), (7, 7))
    assert Mask(message.mask.encode()).message(segment) != segment


def test_equal_tokens_of_other_sessions_and_recordings_are_not_equal() -> None:
    found = set()
    # -1: no session, which a peer may claim all the same.
    for session, key in itertools.product((-1, 1, 2), (b"a", b"b")):
        segment = Segment(SessionId(session), SegmentId(0), Version(0), NODES, (-1, 0), (7, 7))
        masked = Mask(key).message(segment)
        assert isinstance(masked, Segment)
        first, second = masked.tokens
        assert first == second
        found.add(first)
    assert len(found) == 6
