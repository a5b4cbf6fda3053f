"""What the programs here have in common: ``PROGRAM MODE URL TEXT`` asks for an answer at once, as
a stream, or with a tool."""

import sys
from pathlib import Path

MODE, URL, TEXT = sys.argv[1:]
MODEL, KEY = "tiny", "sk-unused"
MESSAGES = [{"role": "user", "content": TEXT}]
PARAMETERS = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("path", "old", "new")},
    "required": ["path", "old", "new"],
}
FUNCTION = {
    "name": "replace",
    "description": "Replace text in a file.",
    "parameters": PARAMETERS,
}


def replace(path: str, old: str, new: str) -> str:
    """Replace text in a file.

    Args:
        path: the file
        old: what is replaced
        new: what replaces it
    """
    file = Path(path)
    file.write_text(file.read_text().replace(old, new))
    return "done"


SAID = set()


def say(text):
    """Print an answer, which is the same by every way that a program takes."""
    SAID.add(text)
    assert len(SAID) == 1, SAID
    print(text)


def show(pieces):
    """Print a stream, which has more than one piece."""
    pieces = [piece for piece in pieces if piece]
    assert len(pieces) > 1, pieces
    say("".join(pieces))
