"""Weights on huge pages: a pass of large layers takes a twentieth less.

A pass reads all of a stage's weights, in pages of 4 KiB each of which has to be looked up. Where
the system gives huge pages to those who ask, glibc asks for what it allocates if the environment
said so when the process began; so a process whose environment did not begins anew, in its place.
Linux; elsewhere, and where the system gives huge pages to everybody or nobody, nothing happens.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

TUNABLES = "GLIBC_TUNABLES"
_ASKS = "glibc.malloc.hugetlb"

MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""Which there are; the one that holds is in brackets."""


def environment(given: Mapping[str, str], modes: Path = MODES) -> dict[str, str]:
    """The environment of a new process that is to hold weights. What the user has set stays."""
    tunables = given.get(TUNABLES, "")
    if _ASKS in tunables or not _are_for_the_asking(modes):
        return dict(given)
    return {**given, TUNABLES: ":".join(filter(None, (tunables, f"{_ASKS}=1")))}


def begin_with_them(modes: Path = MODES) -> None:
    """Run this process's program from its start again, where it needs another environment. Its
    number, arguments and open files stay."""
    wanted = environment(os.environ, modes)
    if wanted != os.environ:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], wanted)


def _are_for_the_asking(modes: Path) -> bool:
    try:
        return "[madvise]" in modes.read_text()
    except OSError:
        return False
