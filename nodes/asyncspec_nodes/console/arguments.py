"""Command-line arguments: argparse with one-line errors (exit code 2), from the environment too."""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from asyncspec.core.errors import UserError, did_you_mean
from asyncspec_nodes.console.hosts import is_host
from asyncspec_protocol.errors import printable

PREFIX = "ASYNCSPEC_"
_MAX_LINE = 4_000
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


MEANT = {
    "--model": "--target",
    "--max-model-len": "--ctx-size",
    "--n-ctx": "--ctx-size",
    "--num-ctx": "--ctx-size",
    "--n-gpu-layers": "--gpu-layers",
    "--max-tokens": "--max-new-tokens",
    "--n-predict": "--max-new-tokens",
    "--num-predict": "--max-new-tokens",
    "--repeat-penalty": "--repetition-penalty",
    "--file": "--prompt-file",
    "--model-draft": "--draft",
    "--ssl-keyfile": "--tls-key",
    "--ssl-key-file": "--tls-key",
    "--ssl-certfile": "--tls-certificate",
    "--ssl-cert-file": "--tls-certificate",
    "--pipeline-parallel-size": "--stages",
    "--quantization": "--quantize",
    "--listen": "--host",
}
"""Options of other programs, by their names there, that are called otherwise here."""


_TEXTS = ("TEXT", "PATTERN")
"""Metavars of arguments that may be empty, or say themselves why not."""


class Parser(argparse.ArgumentParser):
    """Without usage dump and abbreviated options; a misspelt one is suggested.

    Every option can be set by ``environment`` (``variable``) as well. What the user writes on the
    command line comes first, also where it excludes a variable's option; a variable that is
    empty is not set."""

    environment: Mapping[str, str] = os.environ

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs = {"allow_abbrev": False, "formatter_class": _Formatter, **kwargs}
        super().__init__(*args, **kwargs)
        self._exclusions: list[list[frozenset[str]]] = []

    @property
    def exclusions(self) -> list[list[frozenset[str]]]:
        """Options that exclude one another, as ``exclude`` and argparse's groups have them."""
        groups = (group._group_actions for group in self._mutually_exclusive_groups)
        return self._exclusions + [[frozenset({one.dest}) for one in group] for group in groups]

    def exclude(self, *sides: Iterable[str]) -> None:
        """Options of different ``sides``, by their names in the namespace, exclude one another:
        where the command line has some of a side, variables of the others are not set."""
        self._exclusions.append([frozenset(side) for side in sides])

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As ``parse_args``: nothing may be left over."""
        words = sys.argv[1:] if args is None else list(args)
        namespace = argparse.Namespace() if namespace is None else namespace
        decided = self._decided(words)
        for action in self._actions:
            name = variable(action)
            text = self.environment.get(name, "") if name else ""
            if text and action.dest not in decided:
                self._set(action, name, text, namespace)
        parsed, rest = super().parse_known_args(words, namespace)
        texts = getattr(parsed, "words", None)
        if isinstance(texts, list) and not any(word.startswith("-") for word in rest):
            # Words of a command that takes several may stand behind options, too.
            texts += rest
            rest = []
        if rest:
            options = [text for action in self._actions for text in action.option_strings]
            wrong = next((word for word in rest if word.startswith("-")), rest[0])
            name = wrong.partition("=")[0]
            same = MEANT.get(name, "")
            meant = f"; did you mean {same}?" if same in options else did_you_mean(name, options)
            self.error(f"unrecognized arguments: {' '.join(rest)}{meant}")
        return parsed, rest

    def _decided(self, words: Sequence[str]) -> set[str]:
        """Names of the options that are on the command line, or excluded by those."""
        written = {action.dest for action in self._actions if _written(action, words)}
        decided = set(written)
        for sides in self.exclusions:
            used = [side for side in sides if side & written]
            if used:
                decided.update(*(side for side in sides if side not in used))
        return decided

    def _set(self, action: argparse.Action, name: str, text: str, to: argparse.Namespace) -> None:
        """Do what the option does, with a variable's text."""
        try:
            if action.nargs == 0:
                if text.lower() not in _YES + _NO:
                    self.error(f"{name} is {text}; it must be 1 or 0")
                if isinstance(action, argparse.BooleanOptionalAction):
                    setattr(to, action.dest, text.lower() in _YES)
                elif text.lower() in _YES:
                    action(self, to, [], name)
            else:
                several = isinstance(action, argparse._AppendAction)
                for part in text.split(",") if several else [text]:
                    value = self._get_value(action, part.strip())
                    self._check_value(action, value)
                    action(self, to, [value] if action.nargs in ("*", "+") else value, name)
        except argparse.ArgumentError as error:
            self.error(f"{name}: {error.message}")
        action.required = False

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Refuse what an unset variable of a shell leaves, but where it is text."""
        # Argparse says which choices there are; a command and its words are one as well.
        free = action.choices is None and action.metavar not in _TEXTS
        if free and "" in arg_strings:
            raise argparse.ArgumentError(action, "is empty; give a value or leave it out")
        return super()._get_values(action, arg_strings)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += did_you_mean(str(value), map(str, action.choices or ()))
            raise


def variable(action: argparse.Action) -> str:
    """The environment variable of an option, as in ``ASYNCSPEC_LOG_DIR``; empty without one."""
    inner = (argparse._HelpAction, Version, Act)
    long = next((name for name in action.option_strings if name.startswith("--")), "")
    if not long or isinstance(action, inner) or action.help == argparse.SUPPRESS:
        return ""
    return PREFIX + long.removeprefix("--").replace("-", "_").upper()


def _written(action: argparse.Action, words: Iterable[str]) -> bool:
    """Whether an option is on the command line."""
    names = {word.partition("=")[0] for word in takewhile(lambda word: word != "--", words)}
    return not names.isdisjoint(action.option_strings)


class Version(argparse.Action):
    """``--version``: the program's name and the package's version."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        text = "show program's version number and exit"
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=text)

    def __call__(self, parser: argparse.ArgumentParser, *args: object) -> None:
        from importlib.metadata import version

        sys.stdout.write(f"{parser.prog} {version('asyncspec')}\n")
        parser.exit()


class Act(argparse._StoreTrueAction):
    """A flag that says what the command does, this once: it has no variable."""


class _Formatter(argparse.HelpFormatter):
    """Names each option's environment variable."""

    def add_argument(self, action: argparse.Action) -> None:
        if name := variable(action):
            action = copy.copy(action)
            action.help = f"{action.help or ''} [{name}]".strip()
        super().add_argument(action)


def option(name: str) -> str:
    """An argument's name as the user writes it."""
    return f"--{name.replace('_', '-')}"


def given(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The values of those of the named arguments that the command has and the user has given."""
    values = {name: getattr(arguments, name, None) for name in names}
    return {name: v for name, v in values.items() if v is not None and v is not False}


def host_and_port(option: str, text: str) -> tuple[str, int]:
    """Parse an option of the form HOST:PORT. Raises ``UserError``."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if not is_host(host) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"{option} {text} is not HOST:PORT")
    return host, int(port)


def state_file(name: str) -> Path:
    """The user's file of this program's that stays from one run to the next."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "asyncspec" / name


def print_notice(line: str) -> None:
    """A line on stderr, part of which may come from another machine; ignored where the terminal has
    closed."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"asyncspec: {printable(' '.join(line.split()), _MAX_LINE)}\n")
