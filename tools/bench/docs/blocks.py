"""Generated blocks of a Markdown page: what stands between two comments is replaced.

``<!-- generated: NAME ARGUMENT -->`` opens a block, ``<!-- end of generated text -->`` closes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from asyncspec.core.errors import UserError

END = "<!-- end of generated text -->"

_BLOCK = re.compile(
    r"^<!-- generated: (?P<name>[a-z-]+) ?(?P<argument>[^>]*?) -->\n(?P<body>.*?)^"
    + re.escape(END),
    re.MULTILINE | re.DOTALL,
)

Generator = Callable[[str], str]
"""The text of a block from the argument of its opening comment."""


def fill(text: str, generators: Mapping[str, Generator]) -> str:
    """The page with every block generated anew. Raises ``UserError`` for a block that names no
    generator and for an opening comment without an end."""
    opened = len(re.findall(r"^<!-- generated:", text, re.MULTILINE))
    ended = len(re.findall(f"^{re.escape(END)}", text, re.MULTILINE))
    if not opened == ended == len(_BLOCK.findall(text)):
        raise UserError(f'a generated block needs its end, "{END}", on a line of its own')

    def replaced(match: re.Match[str]) -> str:
        name, argument = match["name"], match["argument"]
        if name not in generators:
            known = ", ".join(generators)
            raise UserError(f"there is no generator {name!r}; there are {known}")
        head = match[0][: match[0].index("\n")]
        return f"{head}\n\n{generators[name](argument).strip()}\n\n{END}"

    return _BLOCK.sub(replaced, text)


def table(head: list[str], right: list[bool], rows: list[list[str]]) -> str:
    """A Markdown table; ``right``: which columns are aligned right."""
    rule = ["---:" if flag else "---" for flag in right]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))
