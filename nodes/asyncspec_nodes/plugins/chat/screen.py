"""The terminal of ``asyncspec chat``: lines to read, commands, and what is printed."""

from __future__ import annotations

import asyncio
import codecs
import os
import sys
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, get_args

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.text import Text

from asyncspec.core.errors import UserError
from asyncspec_nodes.console.arguments import state_file
from asyncspec_nodes.console.output import harmless
from asyncspec_nodes.console.prompt_progress import PromptProgress
from asyncspec_nodes.console.waiting import Waiting
from asyncspec_nodes.plugins.chat.talkers import End, Piece, Reading
from asyncspec_protocol.sampling import RANGES

if TYPE_CHECKING:
    from prompt_toolkit.key_binding.key_processor import KeyPressEvent

SETTABLE = (
    *("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)

HELP = """\
/system TEXT     the system prompt; /system alone shows it, /system - removes it
/set NAME VALUE  a setting; /set NAME - leaves it to the model, /set alone shows all
/reset           forget the conversation
/retry           answer the last question once more
/passes          show or hide which words came together in one pass
/help            this text
/bye             leave; so does Ctrl-D
Enter sends, Alt+Enter is a new line, Up finds earlier lines, Ctrl-C stops an answer."""

TINTS = ("bright_white on dark_blue", "bright_white on dark_green")
"""Styles of passes that brought several tokens, by turns."""


class Command(Struct, frozen=True):
    """A line such as ``/set seed 3``."""

    name: str
    rest: str

    @classmethod
    def of(cls, line: str) -> Command | None:
        """None for what is said to the model. ``//`` begins a message with one slash."""
        if not line.startswith("/") or line.startswith("//"):
            return None
        name, _, rest = line[1:].partition(" ")
        return cls(name.lower(), rest.strip())


def read_setting(text: str) -> tuple[str, int | float | None]:
    """The setting of ``NAME VALUE``; None for ``-``. Raises ``UserError``."""
    written_name, _, value = text.replace("=", " ").partition(" ")
    name = written_name.replace("-", "_")
    name = {"max_tokens": "max_new_tokens"}.get(name, name)
    if name not in SETTABLE:
        raise UserError(f"there is no setting {written_name!r}; there are {', '.join(SETTABLE)}")
    value = value.strip()
    if value == "-":
        return name, None
    kind = get_args(RANGES[name])[0]
    try:
        return name, msgspec.convert(kind(value), RANGES[name])
    except (ValueError, msgspec.ValidationError):
        rule = get_args(RANGES[name])[1].description
        raise UserError(f"{name} is {value!r}; it must be {rule}") from None


class Screen:
    """Prints answers. ``plain``: text and nothing else, for files and pipes."""

    def __init__(self, *, plain: bool) -> None:
        self._plain = plain
        self._console = Console(file=sys.stdout, highlight=False, markup=False, soft_wrap=True)
        self.passes = False
        self._shown = 0
        self._tokens = 0
        # The model's thoughts are what was printed last.
        self._thinking = False
        # Until an answer begins.
        self._waiting = Waiting("the model reads")
        self._progress = PromptProgress()

    def note(self, text: str) -> None:
        """A line about the conversation."""
        if not self._plain:
            self._console.print(Text(text, style="dim"))

    def error(self, text: str) -> None:
        """A line on stderr."""
        sys.stderr.write(f"asyncspec: {harmless(' '.join(text.split()))}\n")

    def begin(self) -> None:
        self._shown = self._tokens = 0
        self._thinking = False
        self._progress = PromptProgress()
        self._waiting.say("")
        if not self._plain:
            self._waiting.__enter__()

    def reads(self, prompt: Reading) -> None:
        """Some of the prompt has been read."""
        self._waiting.say(self._progress.line(prompt.read, prompt.total))

    def waits_no_more(self) -> None:
        """The answer begins, or there is none."""
        self._waiting.stop()

    def show(self, piece: Piece) -> None:
        self.waits_no_more()
        self._shown += 1
        self._tokens += piece.tokens
        text = harmless(piece.text)
        if self._plain:
            sys.stdout.write(text)
        else:
            if self._thinking and text:
                self._console.print("\n")
            self._thinking = bool(piece.thought) or (self._thinking and not text)
            self._console.print(Text(harmless(piece.thought), style="dim italic"), end="")
            tinted = self.passes and piece.tokens > 1
            style = TINTS[self._shown % 2] if tinted else ""
            self._console.print(Text(text, style=style), end="")
        sys.stdout.flush()

    def end(self, end: End | None) -> None:
        """``end``: None where the answer was stopped."""
        sys.stdout.write("\n")
        if self._plain:
            sys.stdout.flush()
            return
        stats = end.stats if end else {}
        speed, times = stats.get("tokens_per_second"), stats.get("times_plain_rate")
        about = "" if stats.get("plain_measured") else "about "
        parts = [f"{about}{times:.1f} times plain decoding"] if times else []
        parts += [f"{speed:.1f} tokens a second"] if speed else []
        parts += [f"{self._tokens} tokens in {self._shown} passes"]
        parts += ["stopped"] if end is None else []
        parts += (
            [f"cut at {self._tokens} tokens"] if end is not None and end.reason == "length" else []
        )
        self.note(f"({', '.join(parts)})")


def interactive() -> bool:
    """Whether a person sits at both ends."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


async def piped_lines() -> AsyncIterator[str]:
    """Every line of standard input is a message."""
    if sys.stdin is None:  # closed by the parent process
        return
    decoder, rest = codecs.getincrementaldecoder("utf-8")(errors="replace"), ""
    while data := await _read(sys.stdin.fileno()):
        *lines, rest = (rest + decoder.decode(data)).split("\n")
        for line in filter(str.strip, lines):
            yield line.removesuffix("\r")
    if rest.strip():
        yield rest.removesuffix("\r")


async def _read(fd: int) -> bytes:
    """Some bytes. A thread that waits for a line could not be interrupted."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    try:
        loop.add_reader(fd, ready.set)
    except PermissionError:  # a file, which is always ready
        return os.read(fd, 65_536)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)
    return os.read(fd, 65_536)


async def edited_lines(notice: Callable[[str], None]) -> AsyncIterator[str]:
    """Lines of an editor with history. ``notice``: takes a line for the user."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    commands = ["/system", "/set", "/reset", "/retry", "/passes", "/help", "/bye"]
    session: PromptSession[str] = PromptSession(
        "> ",
        multiline=True,
        key_bindings=keys,
        history=_history(notice),
        completer=WordCompleter(commands, sentence=True),
        complete_while_typing=False,
        prompt_continuation=lambda width, number, soft: "  ",
    )
    while True:
        try:
            line = await session.prompt_async()
        except KeyboardInterrupt:
            notice("Ctrl-D or /bye leaves.")
            continue
        except EOFError:
            return
        if line.strip():
            yield line


def _history(notice: Callable[[str], None]) -> Any:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    path = state_file("chat_history")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError as error:
        notice(f"earlier lines are not kept: {path}: {error.strerror}")
        return InMemoryHistory()
    return FileHistory(str(path))
