"""Chat templates: how a conversation becomes a prompt."""

from __future__ import annotations

from pathlib import Path

from asyncspec.core.errors import UserError

PLAIN = "plain"
"""For base models: the messages' texts, line by line."""

_PLAIN = "{{ bos_token or '' }}{% for message in messages %}{{ message.content }}\n{% endfor %}"


def read_template(name: str | None) -> str | None:
    """The Jinja template ``name``: a file or ``PLAIN``; None: the tokenizer's own. Raises
    ``UserError``."""
    if name is None or name == PLAIN:
        return name and _PLAIN
    try:
        return Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read the chat template {name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"the chat template {name} is not UTF-8 text") from None
