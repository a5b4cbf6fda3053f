"""Claude Code's billing header: accounts of Anthropic's service in a system prompt. Pure.

It is no text for a model, and it is another one in every request: with it no two prompts had a
common prefix. Clients send it as a block of its own or as the first line, and routers join it to
what follows, so its pairs say where it ends.
"""

from __future__ import annotations

import re

BILLING_HEADER = "x-anthropic-billing-header"

_HEADER = re.compile(
    rf"{BILLING_HEADER}:[ \t]*cc_version=[^;\n]*(?:;[ \t]*cc?[\w.-]*=[^;\n]*)*(?:;|(?=\n)|\Z)\s*"
)


def without_billing(text: str) -> str:
    """A system prompt without the header; no other text goes."""
    return _HEADER.sub("", text) if BILLING_HEADER in text else text
