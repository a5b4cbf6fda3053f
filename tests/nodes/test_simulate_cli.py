"""``asyncspec simulate`` as a user types it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

import commands
from asyncspec.policy.registry import lossless
from asyncspec.trace.file import read_trace
from asyncspec_nodes.cli import main as cli
from asyncspec_nodes.plugins.simulation.recorded import FORMAT, LanguageHeader, RecordedText
from asyncspec_nodes.plugins.viewer.analysis.build import build
from asyncspec_nodes.plugins.viewer.replay import replay
from tools.bench.record_language import write_language

FEW = ("--tokens", "20", "--prompt-tokens", "4")


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    return commands.json_output(capsys, "simulate", *FEW, "--json", *argv)


def complaint(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    return commands.usage_error(capsys, "simulate", *argv)


def test_all_policies_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", *FEW]) == 0
    *lines, unit = capsys.readouterr().out.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert "stage pass" in unit
    assert [line.split("|")[1].strip() for line in lines[2:]] == list(lossless())
    assert lines[2].split("|")[3].strip() == "1.00"


def test_lossy_policies_run_and_are_called_lossy(capsys: pytest.CaptureFixture[str]) -> None:
    names = "specpipe,lossy-relaxed,lossy-top-p:top_p=0.01"
    found = answer(capsys, "--policy", names, "--tokens", "150")["policies"]
    exact, relaxed, narrow = found.values()
    assert not exact["lossy"]
    assert exact["matches_reference"] is True
    for one in (relaxed, narrow):
        assert one["lossy"]
        assert one["matches_reference"] == "lossy: not compared"
        assert one["stats"]["lossy"] == 1
    # Any child will do; or none but the target's own, which is the lossless choice.
    assert relaxed["stats"]["misses"] < exact["stats"]["misses"]
    assert narrow["stats"]["turns"] == exact["stats"]["turns"]
    assert cli.main(["simulate", *FEW, "--policy", names]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [f"{name} is lossy: not compared" for name in names.split(",")[1:]]


def test_a_lossy_run_is_recorded_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "lossy.trace"
    answer(capsys, "--policy", "lossy-relaxed", "--trace", str(file))
    played = replay(read_trace(file).lines)
    assert [node.difference for node in played] == [None] * 4


def test_json_has_the_metrics_and_the_devices(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--policy", "pruned,flowspec", "--policy", "pruned", "--stages", "2")
    assert list(found["policies"]) == ["pruned", "flowspec"]
    assert (found["stages"], found["tokens"], found["costs"]) == (2, 20, "turns")
    for one in found["policies"].values():
        stats = one["stats"]
        assert stats["new_tokens"] == 20
        assert stats["prompt_tokens"] == 4
        assert stats["turns"] > 0
        assert stats["wasted_rows"] > 0
        assert stats["bytes_sent"] > 0
        speed = 19 / stats["decode_seconds"]
        assert stats["tokens_per_second"] == pytest.approx(speed)
        assert one["requests"] == [stats]
        assert len(one["busy"]) == 3
        assert one["virtual_seconds"] >= stats["decode_seconds"]
        assert one["matches_reference"] is True


def test_requests_run_at_the_same_time(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--policy", "autoregressive", "--stages", "4")
    (alone,) = answer(capsys, *argv)["policies"].values()
    (three,) = answer(capsys, *argv, "--requests", "3")["policies"].values()
    assert len(three["requests"]) == 3
    assert three["stats"]["new_tokens"] == 60
    speed, one = three["stats"]["tokens_per_second"], alone["stats"]["tokens_per_second"]
    assert 2 < speed / one <= 3.01


def test_costs_are_a_preset_and_what_overrides_it(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--policy", "autoregressive", "--stages", "3", "--latency", "0"]
    argv += ["--verdict-seconds", "0", "--costs", "jetson-7b"]

    def seconds(*more: str) -> float:
        (one,) = answer(capsys, *argv, *more)["policies"].values()
        return float(one["stats"]["decode_seconds"]) / 19

    assert seconds() == pytest.approx(3)
    assert seconds("--stage-seconds", "0.5") == pytest.approx(1.5)
    assert seconds("--slow", "3=2.0", "--slow", "1=1.5,2=1") == pytest.approx(4.5)
    assert seconds("--latency", "0.25") == pytest.approx(4)
    assert seconds("--verdict-seconds", "1") == pytest.approx(4)
    assert seconds("--jitter", "0.5", "--seed", "7") != pytest.approx(3)
    # Two hops between stages, of 1 Mbyte each at 80 Mbit/s: a tenth of a second, and some headers.
    assert 3.2 < seconds("--bandwidth", "80", "--width", "500000") < 3.21
    model = answer(capsys, *argv, "--plateau", "4", "--draft-seconds", "9")["cost_model"]
    assert (model["stage"]["plateau"], model["draft"]["level_seconds"]) == (4, 9.0)


def test_the_unit_of_time_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """A preset's is a pass of a stage; with ``--stage-seconds`` it is a second."""
    argv = ("--policy", "chunked", "--costs", "jetson-7b")
    assert answer(capsys, *argv)["unit"] == "stage pass"
    assert answer(capsys, *argv, "--stage-seconds", "0.06")["unit"] == "second"
    assert cli.main(["simulate", *FEW, *argv]) == 0
    head, *_, unit = capsys.readouterr().out.splitlines()
    assert "tokens/stage pass" in head
    assert "tokens/s " not in head
    assert unit == (
        "the unit of time is a stage pass; --stage-seconds S, what a pass takes on your machines, "
        "makes it a second"
    )
    assert cli.main(["simulate", *FEW, *argv, "--stage-seconds", "0.06"]) == 0
    head, *rest = capsys.readouterr().out.splitlines()
    assert "tokens/s " in head
    assert "stage pass" not in head
    assert rest[-1] == "the unit of time is a second: a stage pass takes 0.06 s"


def test_a_bar_on_a_terminal() -> None:
    """On stderr; stdout has the JSON object alone, and nothing of the bar stays."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    command = [sys.executable, "-P", "-m", "asyncspec_nodes.cli.main", "simulate", *FEW, "--json"]
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        seen = b""
        with contextlib.suppress(OSError):  # Linux's end of a terminal
            while part := os.read(ours, 4096):
                seen += part
        out, _ = process.communicate()
    os.close(ours)
    assert process.returncode == 0
    assert list(json.loads(out)["policies"]) == list(lossless())
    assert b"autoregressive" in seen


def test_a_recorded_language(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = RecordedText((1, 2), (3, 4, 5), ((3,), (9, 4), (5,)), ((-0.1,), (-0.2, -2.0), (-0.1,)))
    path = tmp_path / "language"
    write_language(path, LanguageHeader(FORMAT, "t", "d", 10), [text])
    (found,) = answer(capsys, "--policy", "chunked", "--language", str(path))["policies"].values()
    assert (found["stats"]["new_tokens"], found["stats"]["prompt_tokens"]) == (3, 2)


def test_a_trace_is_like_that_of_a_real_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace"
    (found,) = answer(capsys, "--policy", "flowspec", "--trace", str(path))["policies"].values()
    trace = read_trace(path)
    assert all(one.difference is None for one in replay(trace.lines))
    assert len(build(trace).tokens) == 20
    assert found["stats"]["new_tokens"] == 20


def test_the_help_names_the_presets(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["simulate", "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "jetson-13b-int4" in text
    assert "default: 0.78" in text
    assert "tokens per stage pass" in " ".join(text.split())


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--stages", "0"], "--stages is 0; it must be at least 1"),
        (["--stages", "9999"], "--stages is 9999; it must be at most 1024"),
        (["--tokens", "0"], "--tokens is 0"),
        (["--requests", "0"], "--requests is 0"),
        (["--policy", "best"], "unknown policy 'best'; there are autoregressive,"),
        (["--policy", ""], "--policy: is empty; give a value or leave it out"),
        (["--costs", "free"], "unknown costs 'free'; there are turns, jetson-7b,"),
        (["--stage-seconds", "0"], "--stage-seconds is 0; it must be above 0"),
        (["--latency", "-1"], "--latency is -1; it must be 0 or more"),
        (["--plateau", "0"], "--plateau is 0"),
        (["--jitter", "1"], "--jitter is 1; it must be 0 or more and below 1"),
        (["--slow", "3"], '--slow 3 is not RANK=FACTOR, such as "3=2.0"'),
        (["--slow", "5=2"], "there is no stage 5; there are 1 to 3"),
        (["--slow", "1=0"], "the factor is 0; it must be above 0"),
        (["--top", "0"], "--top is 0; it must be above 0"),
        (["--decay", "1.5"], "--decay is 1.5"),
        (["--coverage", "0.5,0.6"], "--coverage 0.5,0.6: chances by rank"),
        (["--coverage", "1,1e-10"], "--coverage 1,1e-10: chances by rank"),
        (["--coverage", "0.5,nan"], "--coverage 0.5,nan: chances by rank"),
        (["--coverage", "inf"], "--coverage inf: chances by rank"),
        (["--coverage", "a"], "--coverage a: could not convert"),
        (["--coverage", "0.5", "--top", "0.5"], "leave one of them out"),
        (["--language", "/nowhere/l"], "cannot read the language /nowhere/l: No such file"),
        (["--language", "/nowhere/l", "--top", "0.5"], "--top is the recording's to say"),
        (["--trace", "t"], "--trace records one run; give one --policy with it"),
        (["--policy", "flowspec", "--trace", "/nowhere/t"], "cannot write the trace /nowhere/t"),
    ],
)
def test_a_wrong_argument(capsys: pytest.CaptureFixture[str], argv: list[str], says: str) -> None:
    assert says in complaint(capsys, *argv)
