"""OpenAI's harmony (gpt-oss), which ``chat.harmony`` reads: it has messages, not marks."""

from asyncspec_nodes.serving.syntax.table import Syntax

CHANNEL = "<|channel|>"
"""Sign of templates in harmony."""

HARMONY_MARKERS = frozenset(
    f"<|{name}|>" for name in ("start", "channel", "constrain", "message", "end", "call", "return")
)
"""Special tokens that structure an answer."""

SYNTAX = Syntax(signs=(CHANNEL,), markers=HARMONY_MARKERS)
