"""A few seconds of ``make fuzz-wire`` for each role, and what it does with what it finds."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest

from asyncspec.actor.link import Link
from asyncspec.actor.routing import Incoming
from asyncspec_protocol.framing import Frame
from asyncspec_protocol.links import client_hello
from asyncspec_protocol.messages import Collect
from commands import usage_error
from tools.fuzz_wire.__main__ import main
from tools.fuzz_wire.attack import Connection
from tools.fuzz_wire.bed import Bed, Found
from tools.fuzz_wire.mutations import frame_of
from tools.fuzz_wire.replay import Saved

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("role", ["draft", "verify", "source"])
def test_mutated_frames_disturb_nobody(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--role", role, "--frames", "600", "--seed", "7", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["mutated"] >= 600
    assert result["answers"] >= 5


def test_a_node_that_ends_is_found_and_its_frames_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = count()

    def check(bed: Bed) -> None:
        if next(checks) > 30:
            raise Found("node 1 has ended: a mistake")

    monkeypatch.setattr(Bed, "check", check)
    saved = tmp_path / "found.json"
    named = ["--role", "verify", "--save", str(saved), "--json"]
    assert main([*named, "--frames", "500"]) == 1
    assert f"--replay {saved}" in capsys.readouterr().err
    kept = json.loads(saved.read_text())
    assert (kept["role"], kept["seed"]) == ("verify", 0)
    assert kept["connections"]
    assert all(one["rank"] in (1, 2) and one["frames"] for one in kept["connections"])


def test_a_mistake_that_ends_one_link_alone_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = Incoming.frame

    def frame(self: Incoming, link: Link, frame: Frame) -> None:
        if isinstance(frame.message, Collect):  # of attackers alone
            raise OverflowError("negative")
        handle(self, link, frame)

    monkeypatch.setattr(Incoming, "frame", frame)
    saved = tmp_path / "found.json"
    assert main(["--role", "verify", "--save", str(saved), "--frames", "500", "--json"]) == 1
    out, err = capsys.readouterr()
    assert "a node has made a mistake: OverflowError('negative')" in err
    (found,) = json.loads(out)
    # Sending them again finds it again, for as long as the mistake is there.
    assert main(["--replay", str(saved), "--json"]) == 1
    (again,) = json.loads(capsys.readouterr().out)
    assert again["found"] == found["found"]
    monkeypatch.undo()
    assert main(["--replay", str(saved), "--json"]) == 0
    (mended,) = json.loads(capsys.readouterr().out)
    assert mended["answers"] >= 5
    assert all(size > 0 for size in mended["memory MiB"])


def test_a_replay_has_the_hostile_stages_of_its_attack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "found.json"
    Saved("draft", 3, [Connection(0, [frame_of(client_hello("fuzzed"))])]).write(saved)
    assert main(["--replay", str(saved), "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["from hostile stages"] > 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--frames", "0"], "--frames is 0; it must be at least 1"),
        (["--role", "none"], "invalid choice: 'none'"),
        (["--save", "no/where.json"], "--save no/where.json: there is no folder no"),
        (["--save", "."], "--save . cannot be written"),
        (["--replay", "no/where.json"], "--replay no/where.json: "),
        (["--replay", "pyproject.toml"], "--replay pyproject.toml: Expected `object`"),
    ],
)
def test_a_users_mistake_is_a_line(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text in usage_error(capsys, *words, main=main)
