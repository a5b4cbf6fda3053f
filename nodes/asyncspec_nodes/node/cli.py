"""``asyncspec-node``: the start of its process.

Imports only light modules, so that SIGINT is handled from process start.

Weights are on transparent huge pages (Linux): a pass of large layers takes 5 % less time. It reads
all of a stage's weights, and each 4 KiB page needs an address translation. Where the kernel gives
huge pages on request (``[madvise]``), glibc requests them for what it allocates if GLIBC_TUNABLES
said so when the process started, so a process without that setting restarts itself in place.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from asyncspec_nodes.console.interrupt import exit_on_interrupt
from asyncspec_nodes.console.output import lenient_stderr, service_stderr

TUNABLES = "GLIBC_TUNABLES"
_HUGE_PAGES = "glibc.malloc.hugetlb"

MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""The kernel's modes, the active one in brackets."""


def huge_page_environment(environment: Mapping[str, str], modes: Path = MODES) -> dict[str, str]:
    """The environment of a new process that is to hold weights. What the user has set stays."""
    tunables, on_request = environment.get(TUNABLES, ""), False
    with contextlib.suppress(OSError):
        on_request = "[madvise]" in modes.read_text()
    if _HUGE_PAGES in tunables or not on_request:
        return dict(environment)
    return {**environment, TUNABLES: ":".join(filter(None, (tunables, f"{_HUGE_PAGES}=1")))}


def reexec_with_huge_pages(modes: Path = MODES) -> None:
    """Re-execute this program where it needs another environment; id, arguments, files stay."""
    wanted = huge_page_environment(os.environ, modes)
    if wanted != os.environ:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], wanted)


def preload(file: Path) -> None:
    """Import what the nodes of ``file`` need, with as many threads as they have: it takes seconds,
    so nodes are forked afterwards. Errors of the file are left to them.

    Meanwhile the garbage collector is off: modules have none, and to look for it again and again
    takes an eighth of the time."""
    gc.disable()
    from asyncspec.backend.threads import set_thread_defaults
    from asyncspec.core.errors import AsyncSpecError
    from asyncspec_nodes.cluster.file import load
    from asyncspec_nodes.node import command, preloading, resources

    del command
    config = None
    with contextlib.suppress(AsyncSpecError):
        config = load(file)
        resources.set_local_threads(config)
    set_thread_defaults()
    preloading.preload_model(None if config is None else config.target.path)
    gc.enable()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 stopped by a signal, 2 a user's mistake, 1 anything else."""
    # Until it serves and handles signals itself, nothing needs cleaning up.
    with lenient_stderr(), service_stderr(), exit_on_interrupt(last_words="", code=0):
        from asyncspec_nodes.node.command import run

        return run(argv)


def entry(argv: Sequence[str] | None = None) -> NoReturn:
    """The process; skips torch's teardown at exit, which takes seconds."""
    if argv is None:  # a forked node inherits its environment
        reexec_with_huge_pages()
    code = main(argv)
    with contextlib.suppress(OSError):  # the parent may be gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    entry()
