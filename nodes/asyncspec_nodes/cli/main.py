"""``asyncspec``: the command line. Errors are one line; nothing here imports torch."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, NamedTuple

from asyncspec.errors import AsyncSpecError, UserError
from asyncspec.policy import POLICIES
from asyncspec.policy.catalogue import parameters
from asyncspec_nodes.cli import memory as memory_cli
from asyncspec_nodes.cli import record as record_cli
from asyncspec_nodes.cli import run_options, serve_options, simulate_options
from asyncspec_nodes.cli import trace as trace_cli
from asyncspec_nodes.cli.arguments import Parser
from asyncspec_nodes.cli.plan import options as plan_options

if TYPE_CHECKING:
    import argparse

INTRODUCTION = "Several small machines serve one large language model, fast and exactly."


def _run(arguments: argparse.Namespace) -> int:
    options = run_options.read_arguments(arguments)
    from asyncspec_nodes.cli.run import run

    return run(options)


def _serve(arguments: argparse.Namespace) -> int:
    options = serve_options.read_arguments(arguments)
    from asyncspec_nodes.cli.serve import serve

    return serve(options)


def _simulate(arguments: argparse.Namespace) -> int:
    from asyncspec_nodes.cli.simulate import run

    return run(arguments)


def _plan(arguments: argparse.Namespace) -> int:
    from asyncspec_nodes.cli.plan.command import run

    return run(arguments)


def _policies(arguments: argparse.Namespace) -> int:
    width = max(map(len, POLICIES))
    for name, policy in POLICIES.items():
        sys.stdout.write(f"{name:{width}}  {_first_line(policy)}\n")
        if settings := parameters(policy):
            written = ",".join(f"{key}={value}" for key, value in settings.items())
            sys.stdout.write(f"{'':{width}}  {name}:{written}\n")
    return 0


def _first_line(policy: object) -> str:
    return (sys.modules[type(policy).__module__].__doc__ or "").strip().splitlines()[0].rstrip(".")


def _parser() -> Parser:
    parser = Parser(prog="asyncspec", description=INTRODUCTION)
    parser.add_argument("--version", action="version", version=f"asyncspec {version('asyncspec')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for described in COMMANDS:
        text = described.text
        command = commands.add_parser(described.name, help=text, description=text)
        command.set_defaults(function=described.function)
        described.arguments(command)
    return parser


class _Command(NamedTuple):
    name: str
    text: str
    arguments: Callable[[Parser], None]
    function: Callable[[argparse.Namespace], int]


COMMANDS = (
    _Command("run", "run prompts on a cluster of processes here", run_options.add_arguments, _run),
    _Command(
        "simulate",
        "run the same machines on a virtual clock, with a model of language and of costs",
        simulate_options.add_arguments,
        _simulate,
    ),
    _Command(
        "memory", "what each stage of a model takes", memory_cli.add_arguments, memory_cli.memory
    ),
    _Command(
        "serve",
        "serve the OpenAI interface over HTTP, on a cluster of processes here or a running one",
        serve_options.add_arguments,
        _serve,
    ),
    _Command(
        "plan",
        "plan who is verified together when many users draft for one target",
        plan_options.add_arguments,
        _plan,
    ),
    _Command("policies", "list the policies", lambda _: None, _policies),
    _Command("record", "record a running cluster", record_cli.add_arguments, record_cli.record),
    _Command("trace", "show a recorded run", trace_cli.add_arguments, trace_cli.trace),
)


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
