"""Numbers on the command line: one line for those that are too little, too much or none."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import commands
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET

OUT = ["inf", "nan", "1e308", "-1", str(10**21)]
SECONDS = ["stage-seconds", "row-seconds", "draft-seconds", "call-seconds"]
SIMULATE = [
    *("tokens", "prompt-tokens", "requests", "sessions", "window", "batch-rows", "stages", "seed"),
    *(
        "top",
        "coverage",
        "decay",
        "repetition",
        "plateau",
        "latency",
        "bandwidth",
        "width",
        "jitter",
    ),
    *("slow", "verdict-seconds", *SECONDS),
]
PLAN = [
    *("users", "alpha", "token-ms", "link-ms", "prefix", "stages", "hop-ms", "jitter"),
    *("true-alpha", "seed"),
]
RUN = [
    *("max-new-tokens", "top-p", "top-k", "min-p", "seed", "concurrency", "stages", "plateau"),
    *("repetition-penalty", "presence-penalty", "frequency-penalty", *SECONDS),
]
FINE = {"presence-penalty", "frequency-penalty", "max-new-tokens"}
"""Of which -1 is one."""

COMMANDS = [
    ("simulate", [], SIMULATE),
    ("plan", ["dipsd", "--preset", "paper"], PLAN),
    ("memory", ["--target", str(BUNDLED_TARGET)], ["stages", "context", "tree"]),
    ("record", ["--connect", "127.0.0.1:1", "FILE"], ["last", "for"]),
    ("run", ["--prompt", "a"], RUN),
]


@pytest.mark.parametrize(
    ("command", "argv", "name", "value"),
    [
        (command, argv, name, value)
        for command, argv, names in COMMANDS
        for name, value in itertools.product(names, OUT)
        if not (name in FINE and value == "-1")
    ],
)
def test_invalid_numbers_name_their_option(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    command: str,
    argv: list[str],
    name: str,
    value: str,
) -> None:
    argv = [str(tmp_path / "trace") if word == "FILE" else word for word in argv]
    given = f"1={value}" if name == "slow" else value
    assert f"--{name}" in commands.usage_error(capsys, command, *argv, f"--{name}={given}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("policy", ["flowspec", "dip-sd", "autoregressive"])
def test_extreme_numbers_can_be_simulated(capsys: pytest.CaptureFixture[str], policy: str) -> None:
    times = [f"--{name}=1e6" for name in SIMULATE if name.endswith("seconds")]
    argv = ["--tokens=8", "--prompt-tokens=8", "--policy", policy, "--json", *times]
    slowest = ["--latency=1e6", "--bandwidth=0.001", "--width=1000000", "--slow=1=1e6"]
    least = ["--latency=0", "--bandwidth=0", "--width=1", "--slow=1=1e-300"]
    for more in (slowest, least, [*slowest, "--window=1000000", "--batch-rows=1000000"]):
        found = commands.json_output(capsys, "simulate", *argv, *more)
        assert found["policies"][policy]["matches_reference"]
