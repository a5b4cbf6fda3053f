"""Commands of the command line: run in this process, or how a child is prepared for them."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

import pytest

from asyncspec_nodes.cli import main as cli


def reset_hangup() -> None:
    """``preexec_fn`` of a child that is to end at SIGHUP, also where this process ignores the
    signal, as under ``nohup``: the child would inherit that."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def json_output(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    """The JSON object that a command prints; it prints nothing else."""
    assert cli.main(list(argv)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    found: dict[str, Any] = json.loads(captured.out)
    return found


def usage_error(
    capsys: pytest.CaptureFixture[str], *argv: str, main: Callable[[list[str]], int] = cli.main
) -> str:
    """The one line on stderr of a command that ends with exit code 2."""
    code: object
    try:
        code = main(list(argv))
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err
