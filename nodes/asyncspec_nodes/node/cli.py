"""``asyncspec-node``: where the process begins.

Law of this file: it imports next to nothing, so that Ctrl-C meets somebody who sees to it from the
start on.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from asyncspec_nodes.console.interrupt import exit_on_interrupt
from asyncspec_nodes.console.output import lenient_stderr
from asyncspec_nodes.node.huge_pages import reexec_with_huge_pages


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 stopped by a signal, 2 a user's mistake, 1 anything else."""
    with lenient_stderr(), exit_on_interrupt(last_words="", code=0):
        from asyncspec_nodes.node.command import run

        # Until it serves, and sees to signals itself, there is nothing to put in order.
        return run(argv)


def entry(argv: Sequence[str] | None = None) -> NoReturn:
    """The process; skips torch's teardown at exit, which takes seconds."""
    if argv is None:  # one that was forked has what it was forked from
        reexec_with_huge_pages()
    code = main(argv)
    with contextlib.suppress(OSError):  # the parent may be gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    entry()
