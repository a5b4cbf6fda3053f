"""``asyncspec``: the command line. Errors are one line; nothing here imports torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from asyncspec.errors import AsyncSpecError, UserError
from asyncspec.policy import POLICIES
from asyncspec_nodes import run_options
from asyncspec_nodes.arguments import Parser

if TYPE_CHECKING:
    import argparse

INTRODUCTION = "Several small machines serve one large language model, fast and exactly."


def _run(arguments: argparse.Namespace) -> int:
    options = run_options.read_arguments(arguments)
    from asyncspec_nodes.run import run

    return run(options)


def _policies(arguments: argparse.Namespace) -> int:
    width = max(map(len, POLICIES))
    for name, policy in POLICIES.items():
        drafts = "drafts" if policy.drafts else "needs no draft"
        sys.stdout.write(f"{name:{width}}  {_first_line(policy)} ({drafts})\n")
    return 0


def _first_line(policy: object) -> str:
    return (sys.modules[type(policy).__module__].__doc__ or "").strip().splitlines()[0].rstrip(".")


def _parser() -> Parser:
    parser = Parser(prog="asyncspec", description=INTRODUCTION)
    parser.add_argument("--version", action="version", version=f"asyncspec {version('asyncspec')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    described: tuple[tuple[str, str, Callable[[argparse.Namespace], int]], ...] = (
        ("run", "run prompts on a cluster of processes on this machine", _run),
        ("policies", "list the policies", _policies),
    )
    for name, text, function in described:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(function=function)
        if name == "run":
            run_options.add_arguments(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 2 a user's mistake, 1 anything else."""
    # A terminal that cannot show a character shows a mark in its place.
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
    try:
        arguments = _parser().parse_args(argv)
        code: int = arguments.function(arguments)
        sys.stdout.flush()
    except UserError as error:
        return _complain(str(error), 2)
    except AsyncSpecError as error:
        return _complain(str(error), 1)
    except KeyboardInterrupt:
        return _complain("interrupted", 1)
    except BrokenPipeError:
        # Whoever read our output has enough; the interpreter must not trip over it once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _complain(text: str, code: int) -> int:
    sys.stderr.write(f"asyncspec: {' '.join(text.split())}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
