"""What ``asyncspec run`` prints, and when."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest
from msgspec.structs import replace

from asyncspec.core.errors import ClusterError, UserError
from asyncspec_nodes.cli.terminal.run import Printer, as_dict, speculation, summary, times_plain
from asyncspec_nodes.client.answers import Answer, Prompt, answer_all
from asyncspec_nodes.reference.check import Comparison
from asyncspec_protocol.clients import TOO_LARGE
from asyncspec_protocol.messages import Finished, Submit

ASKED = Submit(0, "x", 9, seed=0, temperature=0, top_k=0, top_p=1, policy="chain")
ANSWERS = (
    Answer(ASKED, 0, 0, "first", text="a", token_ids=(5,), finish_reason="stop"),
    Answer(ASKED, 1, 0, None, error=ClusterError("the link is gone")),
    Answer(ASKED, 1, 1, None, text="é"),
)
SAME = Comparison(equal=True, tokens=1, same=1, sentence="equal")


def lines(capsys: pytest.CaptureFixture[str]) -> list[object]:
    """What was printed since the last time."""
    out, err = capsys.readouterr()
    assert err == ""
    return [json.loads(line) for line in out.splitlines()]


def as_read(answer: Answer) -> object:
    return json.loads(json.dumps(as_dict(answer, 3, "bitwise")))


def test_a_list_is_answered_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    printer = Printer(many=True, json=True, checked=False)
    printer.begin(3, "bitwise")
    for answer in ANSWERS:
        printer.done(answer)
        assert lines(capsys) == [as_read(answer)]
    printer.stop()
    printer.end(ANSWERS, ())
    assert lines(capsys) == []


@pytest.mark.parametrize("many", [False, True])
def test_a_checked_answer_is_printed_after_its_check(
    many: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    printer = Printer(many=many, json=True, checked=True)
    printer.begin(3, "bitwise")
    answers = [replace(answer, error=None) for answer in ANSWERS[: 1 + many]]
    for answer in answers:
        printer.done(answer)
    assert lines(capsys) == []
    printer.end(answers, [SAME] * len(answers))
    found = lines(capsys)
    assert [line.pop("check")["sentence"] for line in found] == ["equal"] * len(answers)  # type: ignore[attr-defined]
    assert found == [as_read(answer) for answer in answers]


def test_a_single_answer_is_printed_once_it_is_sure(capsys: pytest.CaptureFixture[str]) -> None:
    """One that fails is an error and no JSON."""
    printer = Printer(many=False, json=True, checked=False)
    printer.begin(3, "bitwise")
    printer.done(ANSWERS[0])
    assert lines(capsys) == []
    printer.end(ANSWERS[:1], ())
    assert lines(capsys) == [as_read(ANSWERS[0])]


def answered(**stats: float) -> Answer:
    known = {"new_tokens": 101, "decode_seconds": 2.0, "tokens_per_second": 50.0}
    return replace(ANSWERS[0], stats=known | stats)


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ([answered(times_plain_rate=5.93, plain_measured=0)], "about 5.9"),
        ([answered(times_plain_rate=0.93, plain_measured=1)], "0.93"),
        # By time: 4 s that would have been 2 + 18.
        ([answered(times_plain_rate=t, plain_measured=1) for t in (1, 9)], "5.00"),
        ([answered()], "-"),
    ],
)
def test_the_summary_begins_with_times_plain_decoding(answers: list[Answer], says: str) -> None:
    assert times_plain(answers) == says
    labels, values = summary(answers, 3, "bitwise").columns[:2]
    assert (next(iter(labels.cells)), next(iter(values.cells))) == ("times plain decoding", says)


def test_the_summary_has_the_speed_of_reading_prompts() -> None:
    fast = answered(prompt_seconds=1.0, prompt_per_second=900.0)
    slow = answered(prompt_seconds=2.0, prompt_per_second=300.0)
    assert "500.0" in [*summary([fast, slow], 3, "bitwise").columns[1].cells]
    assert "prompt tokens/s" not in [*summary([answered()], 3, "bitwise").columns[0].cells]


def test_the_summary_says_how_many_answers_went_on_on_another_kind_of_processor() -> None:
    answers = [answered(processor_changes=2), answered(), answered(processor_changes=1)]
    cells = [*summary(answers, 3, "bitwise").columns[1].cells]
    assert (
        "2 answers went on where layers had moved to another kind: bits may differ there" in cells
    )


def test_the_summary_says_what_share_of_drafts_by_text_can_be_used() -> None:
    cells = [*summary([answered(usable_drafts_rate=0.834)], 3, "bitwise").columns[1].cells]
    assert "83% of the draft's tokens can be used" in cells


def test_speculation_is_told_of_the_whole_answer() -> None:
    """Not only what the policy had come to by its end."""
    reached = {"first_choice_rate": 0.5, "row_cost_rate": 0.1, "speed_rate": 1.0}
    reached |= {"segment_rows": 0, "segment_levels": 0, "root_levels": 0}
    line = speculation([answered(hits=76, misses=24, **reached)])
    assert line.startswith("76 of 100 tokens were drafted ahead; at the end the draft's first")
    assert line.endswith("no speculation")


class Ending:
    """A client each of whose answers ends at once."""

    def __init__(self, end: Finished) -> None:
        self._end = end

    async def ask(self, submit: Submit) -> AsyncGenerator[Finished, None]:
        yield self._end


@pytest.mark.parametrize(
    ("code", "stats", "kind"),
    [
        ("invalid", {}, UserError),
        (TOO_LARGE, {"seconds": 1.0}, UserError),
        ("busy", {}, ClusterError),
        ("", {"seconds": 1.0}, ClusterError),
    ],
)
def test_whose_mistake_an_error_is(code: str, stats: dict[str, float], kind: type) -> None:
    """The exit code says it."""
    answers: list[Answer] = []
    client = cast(Any, Ending(Finished(0, "error", "no", stats, code)))
    answered = answer_all(
        client, (Prompt(("x",)),), ASKED, concurrency=1, show=str, done=answers.append
    )
    asyncio.run(answered)
    assert [type(one.error) for one in answers] == [kind]
