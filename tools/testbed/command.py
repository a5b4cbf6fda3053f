"""``python tools/testbed COMMAND``: run, up, down, exec, check, beds."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import NoReturn, get_args

from asyncspec.core.errors import AsyncSpecError, UserError
from asyncspec_nodes.console.arguments import Parser, Version
from asyncspec_nodes.console.signals import SIGNALS
from tools.testbed import description, state
from tools.testbed.bed import Bed
from tools.testbed.check import check
from tools.testbed.create import Network
from tools.testbed.remove import ask_owner, remove, sweep
from tools.testbed.state import State


def parser() -> Parser:
    """The command line."""
    top = Parser(
        prog="testbed", description="N devices on one Linux machine (tools/testbed/README.md)."
    )
    top.add_argument("--version", action=Version)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text)

    for name, text in (
        ("run", "a cluster on a bed; after -- the options of asyncspec run"),
        ("up", "make a bed and hold it until Ctrl-C or down"),
    ):
        command = add(name, text)
        command.add_argument("bed", metavar="BED", help="a .toml file, or the name of a bed")
        command.add_argument(
            "--network", choices=get_args(Network), default="auto", help="default: auto"
        )
        if name == "run":
            command.add_argument("--serve", action="store_true", help="ask nothing; say where to")
    down = add("down", "remove beds: those that are up, and what is left of others")
    down.add_argument("--bed", metavar="ID", help="only this one")
    inside = add("exec", "a command on a device of a bed that is up: exec 0 -- COMMAND")
    inside.add_argument("device", type=int, metavar="DEVICE")
    inside.add_argument("--bed", metavar="ID", help="which, if several are up")
    add("check", "what works here and what is missing")
    add("beds", "the ready-made beds")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 2 a user's mistake, 1 anything else."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["proxy"]:  # our own child, not for people
        from tools.testbed.proxy import main as proxy

        return proxy()
    cut = words.index("--") if "--" in words else len(words)
    options = parser().parse_args(words[:cut])
    options.rest = words[cut + 1 :]
    try:
        with _interruptible():
            return COMMANDS[options.command](options)
    except UserError as error:
        return _complain(str(error), 2)
    except AsyncSpecError as error:
        return _complain(str(error), 1)
    except KeyboardInterrupt:
        return _complain("interrupted", 1)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Every way of asking us to end ends in ``KeyboardInterrupt``, so what stands is taken down."""
    before = {signum: signal.signal(signum, _interrupt) for signum in SIGNALS}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    # The first one ends what runs; no other one may end the clearing up.
    for other in SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt


def _run(options: argparse.Namespace) -> int:
    bed_file = description.load(options.bed)
    from tools.testbed import run

    argv = options.rest
    if options.serve:
        argv = [*argv, "--prompt", "-"]  # none is asked
    wanted = run.options_for(bed_file, argv)
    with Bed.open(bed_file, options.network) as bed:
        _say_notes(bed)
        return run.serve(bed, wanted) if options.serve else run.run(bed, wanted)


def _up(options: argparse.Namespace) -> int:
    _nothing_after(options)
    with Bed.open(description.load(options.bed), options.network) as bed:
        _say_notes(bed)
        print(f"bed {bed.id}")
        for number, (host, port) in enumerate(bed.devices):
            print(f"device {number}  {host}  a node would listen on port {port}")
        others = [
            (i, j) for i in range(len(bed.devices)) for j in range(len(bed.devices)) if i != j
        ]
        for i, j in others:
            host, port = bed.reach(i, j)
            print(f"{i} finds {j} at {host}:{port}")
        print("up; Ctrl-C takes it down", flush=True)
        raise asyncio.run(bed.watch())


def _down(options: argparse.Namespace) -> int:
    _nothing_after(options)
    chosen = [bed for bed in state.known() if options.bed in (None, bed.id)]
    if options.bed is not None and not chosen:
        raise UserError(f"there is no bed {options.bed}")
    for bed in chosen:
        ask_owner(bed)
        with state.locked():
            remove(bed)
        print(f"bed {bed.id} is down")
    return 0


def _exec(options: argparse.Namespace) -> int:
    if not options.rest:
        raise UserError("exec what? testbed exec DEVICE -- COMMAND")
    bed = _the_bed(options.bed)
    if not 0 <= options.device < bed.devices:
        raise UserError(f"bed {bed.id} has devices 0 to {bed.devices - 1}, not {options.device}")
    command = [*bed.prefixes[options.device], *options.rest]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise UserError(f"cannot run {command[0]}: {error.strerror}") from None


def _the_bed(name: str | None) -> State:
    up = [bed for bed in state.known() if state.alive(bed) and name in (None, bed.id)]
    if not up:
        raise UserError("no bed is up" if name is None else f"there is no bed {name}")
    if len(up) > 1:
        raise UserError(f"several beds are up; choose with --bed: {', '.join(b.id for b in up)}")
    return up[0]


def _check(options: argparse.Namespace) -> int:
    _nothing_after(options)
    with state.locked():
        for name in sweep():
            print(f"removed the remains of bed {name}")
    for line in check():
        print(line)
    return 0


def _beds(options: argparse.Namespace) -> int:
    _nothing_after(options)
    for name, path in description.ready_made().items():
        print(f"{name:18} {description.load(str(path)).about}")
    return 0


def _say_notes(bed: Bed) -> None:
    for note in bed.notes:
        sys.stderr.write(f"testbed: {note}\n")


def _nothing_after(options: argparse.Namespace) -> None:
    if options.rest:
        raise UserError(f"{options.command} takes nothing after --")


def _complain(text: str, code: int) -> int:
    sys.stderr.write(f"testbed: {' '.join(text.split())}\n")
    return code


COMMANDS = {
    "run": _run,
    "up": _up,
    "down": _down,
    "exec": _exec,
    "check": _check,
    "beds": _beds,
}
