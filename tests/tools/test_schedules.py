"""The command that runs random schedules of faults."""

from __future__ import annotations

import json

import pytest

import fault_schedules
from tools.schedules import command

pytestmark = pytest.mark.slow


def test_a_block_tells_what_struck_and_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fault_schedules.run
    whole = command.run(range(20, 30))
    assert not whole.failed
    assert sum(whole.faults.values()) > 0
    seventh = fault_schedules.drawn(27)

    def broken(schedule: fault_schedules.Schedule) -> fault_schedules.Run:
        assert schedule != seventh
        return before(schedule)

    monkeypatch.setattr(fault_schedules, "run", broken)
    assert command.run(range(20, 30)).failed == (27,)


def test_the_result_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(None, ["--count", "10", "--first", "3", "--jobs", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["schedules"], result["first"], result["failed"]) == (10, 3, [])
    assert result["steps"] > 0
