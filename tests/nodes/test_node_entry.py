"""A process that is to hold weights begins with the environment that puts them on huge pages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncspec_nodes.node.cli import TUNABLES, huge_page_environment

ASKED = "glibc.malloc.hugetlb=1"


@pytest.fixture
def on_demand(tmp_path: Path) -> Path:
    modes = tmp_path / "enabled"
    modes.write_text("always [madvise] never\n")
    return modes


@pytest.mark.parametrize("modes", ["[always] madvise never\n", "always madvise [never]\n", None])
def test_a_needless_or_futile_draft_request_is_not_sent(modes: str | None, tmp_path: Path) -> None:
    if modes is not None:
        (tmp_path / "enabled").write_text(modes)
    assert huge_page_environment({"A": "b"}, tmp_path / "enabled") == {"A": "b"}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, {TUNABLES: ASKED}),
        ({TUNABLES: ""}, {TUNABLES: ASKED}),
        (
            {TUNABLES: "glibc.malloc.arena_max=1", "A": "b"},
            {TUNABLES: f"glibc.malloc.arena_max=1:{ASKED}", "A": "b"},
        ),
        ({TUNABLES: "glibc.malloc.hugetlb=0"}, {TUNABLES: "glibc.malloc.hugetlb=0"}),
        ({TUNABLES: ASKED}, {TUNABLES: ASKED}),
    ],
)
def test_the_users_environment_is_kept(
    given: dict[str, str], wanted: dict[str, str], on_demand: Path
) -> None:
    before = dict(given)
    assert huge_page_environment(given, on_demand) == wanted
    assert given == before


PROGRAM = """
import json, os, sys
from pathlib import Path
from asyncspec_nodes.node.cli import reexec_with_huge_pages
print("begun", flush=True)
reexec_with_huge_pages(Path(sys.argv[1]))
told = os.environ.get("GLIBC_TUNABLES"), os.read(int(sys.argv[2]), 9).decode()
print(json.dumps([os.getpid(), sys.argv[1:], *told]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are Linux's")
@pytest.mark.parametrize("given", ["", ASKED])
def test_reexec_keeps_pid_arguments_and_files(given: str, on_demand: Path) -> None:
    ours, theirs = os.pipe()
    os.write(theirs, b"open")
    arguments = [str(on_demand), str(ours), "two words", ""]
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        env={**os.environ, TUNABLES: given},
        stdout=subprocess.PIPE,
        pass_fds=(ours,),
        text=True,
    ) as process:
        *begun, last = process.communicate()[0].splitlines()
    for end in (ours, theirs):
        os.close(end)
    assert begun == ["begun"] * (1 if given else 2)
    assert json.loads(last) == [process.pid, arguments, ASKED, "open"]
