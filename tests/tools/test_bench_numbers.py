"""Numbers that a benchmark cannot work with are one line and exit code 2, whichever part it is."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from tools.bench.__main__ import KINDS, main

FROM_ZERO = {
    "temperature",
    "temperatures",
    "seed",
    "latency-ms",
    "layer-ms",
    "stage-seconds",
    "draft-seconds",
    "beside",
}
"""Of these zero is as good as any."""

RATES = ("report", "dipsd-run")
"""They tell what comes after the first token."""


class Noting(argparse.ArgumentParser):
    """Notes which of its options are numbers."""

    def __init__(self) -> None:
        self.numbers: list[str] = []
        super().__init__()

    def add_argument(self, *names: str, **how: Any) -> argparse.Action:
        """See ``argparse``."""
        if how.get("type") in (int, float):
            self.numbers.append(names[0].removeprefix("--"))
        return super().add_argument(*names, **how)


def numbers(kind: str) -> list[str]:
    """A part's options that are numbers."""
    parser = Noting()
    KINDS[kind][0].add_arguments(parser)
    return parser.numbers


NEEDED = {"learn": "head", "vllm": "vllm"}
"""Options that a part is not run without."""


def wrong() -> list[tuple[str, str, str]]:
    """Parts, options and values."""
    found = [(kind, name, value) for kind in KINDS for name in numbers(kind)
             for value in ("nan", "-1", "0") if value != "0" or name not in FROM_ZERO]  # fmt: skip
    found += [(kind, "max-new-tokens", "1") for kind in RATES]
    return found


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What is said where exit code is 2."""
    try:
        code = main(argv)
    except SystemExit as end:  # argparse's way
        code = int(str(end.code))
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.startswith("bench")
    assert err.count("\n") == 1
    return str(err)


@pytest.mark.parametrize(("kind", "name", "value"), wrong())
def test_a_number_that_cannot_be_is_one_line(
    kind: str, name: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "set.jsonl").write_text(json.dumps({"turns": ["x"]}) + "\n")
    argv = [kind, f"--{name}={value}"]
    if kind in ("report", "record-language", "real", "learn"):
        argv += ["--prompts", str(tmp_path)]
    if kind in NEEDED:
        argv += [f"--{NEEDED[kind]}", str(tmp_path)]
    if kind == "report":
        argv += ["--out", str(tmp_path / "out")]
    if kind in ("record-language", "enlarge"):
        argv.append(str(tmp_path / "out"))
    said = refused(argv, capsys)
    assert name.replace("-", "_") in said.replace("-", "_")
    assert value in said
    assert not (tmp_path / "out").exists()


def test_numbers_are_found() -> None:
    assert numbers("grid")
    assert {"bits", "peers"} <= {kind for kind in KINDS if numbers(kind)}
