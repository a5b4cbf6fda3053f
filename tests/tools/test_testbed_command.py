"""``python tools/testbed``: mistakes are one line and exit code 2; a cluster on a bed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from asyncspec.core.errors import UserError
from asyncspec_nodes.cluster.config import Config
from effort import nightly
from tools.testbed import command, description, state
from tools.testbed.remove import remove
from tools.testbed.run import options_for

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MAIN = ROOT / "tools" / "testbed" / "__main__.py"


TOY = ("--target", "toy:layers=4,vocab=64", "--draft", "ngram")
"""It needs no torch."""


def typed(*words: str) -> subprocess.CompletedProcess[str]:
    """The command, as a user types it."""
    line = [sys.executable, str(MAIN), *words]
    return subprocess.run(line, capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["fly"], "invalid choice: 'fly'"),
        (["up", "nowhere"], "there is no bed 'nowhere'"),
        (["up", "nowhere.toml"], "cannot read the bed file nowhere.toml"),
        (["up", "lan-125", "--", "x"], "up takes nothing after --"),
        (["down", "--bed", "asb-none"], "there is no bed asb-none"),
        (["exec", "0"], "exec what?"),
        (["exec", "0", "--bed", "asb-none", "--", "true"], "there is no bed asb-none"),
        (["run", "lan-125", "--", "--stages", "2"], "the bed has 5 devices, the cluster 3 nodes"),
        (["run", "lan-125", "--", "--connect", "a:1"], "leave --connect and --config out"),
        (["run", "lan-125", "--", "--max-new-tokens", "-2"], "--max"),
        (["run", "one-slow-paced", "--", "--stage-seconds", "0.01"], "leave --stage-seconds, "),
        (["run", "one-slow-paced", "--", "--call-seconds", "0.01"], "leave --draft-seconds and "),
        (["run", "one-slow-paced", "--", "--source-apart"], "device[0].pace: device 4 drafts"),
    ],
)
def test_a_mistake_is_a_line_and_exit_code_2(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = command.main(words)
    except SystemExit as end:  # argparse's way
        code = int(str(end.code))
    out, err = capsys.readouterr()
    assert code == 2
    assert text in err
    assert err.startswith("testbed")
    assert err.count("\n") == 1
    assert out == ""


def test_the_folder_of_all_beds_is_the_users_alone(tmp_path: Path) -> None:
    made = state.private(tmp_path / "run" / "beds")
    assert made.stat().st_mode & 0o777 == 0o700
    assert state.private(made) == made
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(made)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o770)
    foreign = ["file", "link", "open"]
    if os.geteuid() == 0:
        (tmp_path / "other").mkdir(mode=0o700)
        os.chown(tmp_path / "other", 12345, 12345)
        foreign.append("other")
    for name in foreign:
        with pytest.raises(UserError, match=f"{name} is not a folder of yours alone"):
            state.private(tmp_path / name)


def test_a_bed_removes_no_folder_but_its_own(tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text("years")
    bed = state.State("asb-none", 1, 1, 1, None, (), (), scratch=str(tmp_path))
    with pytest.raises(UserError, match="which is no bed's"):
        remove(bed)
    assert (tmp_path / "thesis").exists()


def test_a_bed_made_under_another_temporary_folder_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / Path(state.scratch("asb-none")).name
    folder.mkdir()
    remove(state.State("asb-none", 1, 1, 1, None, (), (), scratch=str(folder)))
    assert not folder.exists()


def test_the_ready_made_beds_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["beds"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(description.ready_made())


def test_a_bed_has_as_many_stages_as_devices_behind_the_draft() -> None:
    bed = description.load("lan-125")
    for argv, stages, nodes in (([], 4, 5), (["--source-apart"], 3, 5)):
        config = options_for(bed, argv).where
        assert isinstance(config, Config)
        assert (config.stages, len(config.nodes)) == (stages, nodes)
    with pytest.raises(UserError):
        options_for(bed, ["--stages", "4", "--source-apart"])


def test_check_says_what_works_here() -> None:
    done = typed("check")
    assert done.returncode == 0
    assert "network   " in done.stdout
    assert "limits    " in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "ready"),
    [
        (["up"], "up;"),
        pytest.param(
            ["run", "--serve"],
            "asyncspec run --connect",
            marks=pytest.mark.processes,
        ),
    ],
)
def test_a_proxy_that_dies_takes_its_bed_down(tmp_path: Path, words: list[str], ready: str) -> None:
    file = tmp_path / "bed.toml"
    file.write_text("[network]\nlatency_ms = 1\n[[device]]\n[[device]]\n")
    line = [sys.executable, str(MAIN), *words, str(file), "--network", "loopback"]
    after = ["--", *TOY] if words != ["up"] else []
    with subprocess.Popen(
        [*line, *after], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as bed:
        assert bed.stdout is not None
        assert next(said for said in bed.stdout if said.startswith(ready))
        (proxy,) = (c for c in psutil.Process(bed.pid).children() if "proxy" in c.cmdline())
        proxy.kill()
        _, err = bed.communicate(timeout=240)
    assert bed.returncode == 1
    assert err.splitlines()[-1] == "testbed: the bed's proxy was killed by SIGKILL"


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("network", "target"),
    [
        ("auto", TOY),
        nightly("auto", ()),
        nightly("loopback", ()),
    ],
)
def test_a_cluster_on_a_bed_says_what_the_target_says(
    tmp_path: Path, network: str, target: Sequence[str]
) -> None:
    """The bundled one at night: nodes in networks of their own each import torch."""
    file = tmp_path / "bed.toml"
    file.write_text("[network]\nmbit = 100\nlatency_ms = 3\njitter_ms = 1\n" + "[[device]]\n" * 3)
    options = ["--prompt", "Once upon a time", "--max-new-tokens", "16", "--json", "--check"]
    done = typed("run", str(file), "--network", network, "--", *target, *options)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["stages"] == 2
    assert answer["check"]["equal"]
    assert answer["stats"]["new_tokens"] == 16
