"""A wait of more than two seconds says what it is for, and its seconds."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from asyncspec_nodes.console.prompt_progress import PromptProgress
from asyncspec_nodes.console.waiting import Waiting
from asyncspec_nodes.local.cluster import LoadingSteps
from asyncspec_nodes.node.reports import LoadingReport, ReadyReport


def shown(what: RenderableType) -> str:
    stream = io.StringIO()
    Console(file=stream, width=60, color_system=None).print(what)
    return stream.getvalue().strip()


def test_a_wait_is_shown_with_its_seconds() -> None:
    now = [10.0]
    with Waiting("the service starts", Console(file=io.StringIO()), lambda: now[0]) as waiting:
        now[0] = 11.0
        assert shown(waiting.line()) == ""
        now[0] = 13.2
        assert shown(waiting.line()) == "the service starts, 3 s"
        waiting.say("stage 1 (starting)")
        assert shown(waiting.line()) == "the service starts, 3 s: stage 1 (starting)"


@given(st.integers(1, 9000), st.integers(0, 9000), st.floats(0.01, 100.0))
def test_the_rest_of_a_prompt_is_expected_to_take_as_long_a_token(
    total: int, cached: int, seconds: float
) -> None:
    now = [5.0]
    progress = PromptProgress(lambda: now[0])
    cached = min(cached, total)
    assert progress.line(cached, total) == f"{cached:,} of {total:,} tokens"
    read = (cached + total) // 2
    now[0] += seconds * (read - cached)
    line = progress.line(read, total)
    if read > cached:
        left = max(1, round(seconds * (total - read)))
        assert line in {
            f"{read:,} of {total:,} tokens, {n} s more" for n in (left - 1, left, left + 1)
        }


def test_nothing_goes_into_a_file() -> None:
    stream = io.StringIO()
    now = [0.0]
    with Waiting("answers", Console(file=stream), lambda: now[0]):
        now[0] = 5.0
    assert stream.getvalue() == ""


def test_a_terminal_has_the_line_until_the_wait_ends() -> None:
    stream = io.StringIO()
    now = [0.0]
    console = Console(file=stream, force_terminal=True, width=60, color_system=None)
    with Waiting("answers", console, lambda: now[0]) as waiting:
        waiting.stop()
        before = stream.getvalue()
        console.print("text")
    assert "answers" not in before  # less than two seconds
    assert stream.getvalue() == f"{before}text\n"


def test_loading_steps_have_their_seconds() -> None:
    now = [0.0]
    steps = LoadingSteps(1, lambda: now[0])
    now[0] = 4.0
    steps(LoadingReport(0, "torch"))
    steps(ReadyReport(1, (0, 1), "float32", "bitwise", 4.0))
    now[0] = 9.0
    lines = [line.split() for line in shown(steps.table()).splitlines()]
    assert lines == [
        ["draft", "node", "loading", "torch", "5", "s"],
        ["stage", "1", "ready", "4", "s"],
    ]
