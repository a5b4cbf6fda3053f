"""Chat templates: how a conversation becomes a prompt."""

from __future__ import annotations

from pathlib import Path

from asyncspec.core.errors import reading

PLAIN = "plain"
"""For base models: the messages' texts, line by line."""

_PLAIN = "{{ bos_token or '' }}{% for message in messages %}{{ message.content }}\n{% endfor %}"


def read_template(name: str | None) -> str | None:
    """The Jinja template ``name``: a file or ``PLAIN``; None: the tokenizer's own. Raises
    ``UserError``."""
    if name is None or name == PLAIN:
        return name and _PLAIN
    with reading(f"the chat template {name}"):
        return Path(name).read_text(encoding="utf-8")
