"""What ``asyncspec status`` says of a node."""

from __future__ import annotations

from asyncspec_nodes.cli.status import node_lines
from asyncspec_protocol.clients import Status
from asyncspec_protocol.ids import DRAFT


def status(**totals: float) -> Status:
    return Status(
        query=0,
        rank=DRAFT,
        role="draft",
        layers=(0, 0),
        up_seconds=1.0,
        busy_seconds=0.0,
        memory_bytes=0,
        sessions=0,
        waiting=0,
        slots=0,
        peers=(),
        round_trips=(),
        sent=(),
        totals=totals,
    )


def test_a_head_that_learns_says_what_it_has_learned() -> None:
    assert len([*node_lines([status()])]) == 1
    assert [*node_lines([status(learned_version=0)])][1] == "  learns: version 0; 0 answers, 0 s"
    gained = {"learned_before": 1.0, "learned_after": 1.5, "learned_answers": 90.0}
    (_, line) = node_lines([status(learned_version=2, learned_seconds=61.2, **gained)])
    assert line == (
        "  learns: version 2, from 1.00 to 1.50 tokens guessed right in a row; 90 answers, 61 s"
    )
