"""Weights on transparent huge pages (Linux): a pass of large layers takes 5 % less time.

A pass reads all of a stage's weights, and each 4 KiB page needs an address translation. Where the
kernel gives huge pages on request (``[madvise]``), glibc requests them for what it allocates if
GLIBC_TUNABLES said so when the process started, so a process without that setting restarts itself
in place. Imports only the standard library's lightest modules, as it runs before all others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

TUNABLES = "GLIBC_TUNABLES"
_ASKS = "glibc.malloc.hugetlb"

MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""The kernel's modes; the active one stands in brackets."""


def huge_page_environment(given: Mapping[str, str], modes: Path = MODES) -> dict[str, str]:
    """The environment of a new process that is to hold weights. What the user has set stays."""
    tunables = given.get(TUNABLES, "")
    if _ASKS in tunables or not _are_for_the_asking(modes):
        return dict(given)
    return {**given, TUNABLES: ":".join(filter(None, (tunables, f"{_ASKS}=1")))}


def reexec_with_huge_pages(modes: Path = MODES) -> None:
    """Restart this process's program in place where it needs another environment. The process id,
    arguments and open files stay."""
    wanted = huge_page_environment(os.environ, modes)
    if wanted != os.environ:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], wanted)


def _are_for_the_asking(modes: Path) -> bool:
    try:
        return "[madvise]" in modes.read_text()
    except OSError:
        return False
