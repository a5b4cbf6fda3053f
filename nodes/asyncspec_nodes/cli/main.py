"""``asyncspec``: where the process begins. Errors are one line.

Law of this file: it imports next to nothing, so that Ctrl-C meets somebody who sees to it from the
start on, and ``--help`` is there at once.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

from asyncspec.errors import AsyncSpecError, UserError
from asyncspec_nodes.cli.interrupt import LAST_WORDS, ends_at_once


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 2 a user's mistake, 1 anything else."""
    if sys.stdout is None:  # closed by whoever started us
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    # A terminal that cannot show a character shows a mark in its place.
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
    try:
        with ends_at_once():
            from asyncspec_nodes.cli import commands
        code = commands.run(argv)
        sys.stdout.flush()
    except UserError as error:
        return _complain(str(error), 2)
    except AsyncSpecError as error:
        return _complain(str(error), 1)
    except KeyboardInterrupt:
        sys.stderr.write(LAST_WORDS)
        return 1
    except BrokenPipeError:
        _write_no_more()  # whoever read our output has enough
        return 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _write_no_more()
        return _complain(f"cannot write: {error.strerror}", 1)
    return code


def _write_no_more() -> None:
    """Or the interpreter would trip over what is left of our output once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(text: str, code: int) -> int:
    sys.stderr.write(f"asyncspec: {' '.join(text.split())}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
