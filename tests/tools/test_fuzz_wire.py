"""A few seconds of ``make fuzz-wire`` for each role, and what it does with what it finds."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest

from asyncspec.actor.link import Link
from asyncspec.actor.routing import Incoming
from asyncspec_protocol.framing import Frame
from asyncspec_protocol.messages import Collect
from tools.fuzz_wire.__main__ import main
from tools.fuzz_wire.bed import Bed, Found


@pytest.mark.parametrize("role", ["draft", "verify", "source"])
def test_mutated_frames_disturb_nobody(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--role", role, "--frames", "600", "--seed", "7", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["mutated"] >= 600
    assert result["answers"] >= 5


def test_a_node_that_ends_is_found_and_its_frames_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And sending them again finds it again."""

    checks = count()

    def check(bed: Bed) -> None:
        if next(checks) > 30:
            raise Found("node 1 has ended: a mistake")

    monkeypatch.setattr(Bed, "check", check)
    saved = tmp_path / "found.json"
    named = ["--role", "verify", "--save", str(saved), "--json"]
    assert main([*named, "--frames", "500"]) == 1
    assert f"--replay {saved}" in capsys.readouterr().err
    connections = json.loads(saved.read_text())
    assert connections
    assert all(one["rank"] in (1, 2) and one["frames"] for one in connections)
    monkeypatch.undo()
    assert main(["--replay", str(saved), "--json"]) == 0


def test_a_mistake_that_ends_one_link_alone_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = Incoming.frame

    def frame(self: Incoming, link: Link, frame: Frame) -> None:
        if isinstance(frame.message, Collect):  # of attackers alone
            raise OverflowError("negative")
        handle(self, link, frame)

    monkeypatch.setattr(Incoming, "frame", frame)
    named = ["--role", "verify", "--save", str(tmp_path / "found.json"), "--json"]
    assert main([*named, "--frames", "500"]) == 1
    assert "a node has made a mistake: OverflowError('negative')" in capsys.readouterr().err


def test_no_frames_are_a_users_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--frames", "0"]) == 2
    assert "less than 1" in capsys.readouterr().err
