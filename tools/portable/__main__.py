"""``python tools/portable``: tests of processes as on another system (CONTRIBUTING.md, "Tests").

They run without /proc and /sys, in a mount namespace, by a Python that takes itself for one on
macOS (``site``): asyncio's loop on a selector, nodes that are executed, not forked.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(__file__).resolve().parent / "site"

TESTS = (
    "nodes/test_join.py",
    "nodes/test_interrupts.py",
    "nodes/test_processes.py::test_answers_to_a_list_are_printed_as_they_come",
    "constraint/test_hostile_grammars.py",
)
"""What starts the most kinds of processes in the least time: ``up`` and ``join``, ``run``,
``serve``, nodes, compilers of grammars."""

# torch's library for Linux reads /proc/cpuinfo; Python does not see it (site).
_WITHOUT = """
cpuinfo=$(cat /proc/cpuinfo)
mount --make-rprivate / && mount -t tmpfs none /sys && mount -t tmpfs none /proc || exit 1
echo "$cpuinfo" > /proc/cpuinfo
exec "$@"
"""


def elsewhere(command: Sequence[str]) -> list[str]:
    """The words that run ``command`` without /proc and /sys."""
    return ["unshare", "--mount", "sh", "-c", _WITHOUT, "sh", *command]


def environment() -> dict[str, str]:
    """The variables by which a Python takes itself for one on macOS."""
    paths = [str(SITE), *(str(ROOT / name) for name in (".", "protocol", "nodes"))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def missing() -> str:
    """Why it cannot be tried here; empty where it can."""
    if sys.platform != "linux" or shutil.which("unshare") is None:
        return "there is no unshare here"
    if os.geteuid() != 0 or subprocess.run(elsewhere(["true"]), capture_output=True).returncode:
        return "who runs this may not make a mount namespace"
    return ""


def main() -> int:
    if why := missing():
        print(f"skipped: {why}")
        return 0
    tests = [str(ROOT / "tests" / name) for name in TESTS]
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow"]
    return subprocess.run(
        elsewhere([*words, *(sys.argv[1:] or tests)]), env=environment(), cwd=ROOT
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
