"""The entry point of ``asyncspec``. Errors are one line.

Its imports are few, so that SIGINT is handled from process start and ``--help`` is immediate.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from asyncspec.core.errors import AddressError, AsyncSpecError, FetchError, UserError
from asyncspec_nodes.console.interrupt import INTERRUPTED, exit_on_interrupt
from asyncspec_nodes.console.output import FULL, Unwritten, lenient_stderr, strict_stdout
from asyncspec_protocol.errors import printable

MAX_LINE = 20_000
"""Characters of an error: all mistakes of a cluster file fit."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 2 a user's mistake, 1 anything else."""
    if sys.platform == "win32":  # has no Unix signals, file locks and inherited sockets
        return _print_error("asyncspec runs on Linux and macOS; on Windows, use it in WSL 2", 2)
    with lenient_stderr():
        try:
            with strict_stdout():
                with exit_on_interrupt():
                    from asyncspec_nodes.cli import commands
                return commands.run(argv)
        except (UserError, FetchError, AddressError) as error:
            return _print_error(str(error), 2)
        except AsyncSpecError as error:
            return _print_error(str(error), 1)
        except KeyboardInterrupt:
            sys.stderr.write(INTERRUPTED)
            return 1
        except Unwritten as lost:
            return _print_error(str(lost), 1) if str(lost) else 1
        except OSError as error:
            if error.errno not in FULL:
                raise
            return _print_error(f"cannot write: {error.strerror}", 1)


def _print_error(text: str, code: int) -> int:
    # Part of it may come from another node.
    line = printable(" ".join(text.split()), MAX_LINE)
    sys.stderr.write(f"asyncspec: {line}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
