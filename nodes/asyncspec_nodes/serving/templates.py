"""What a chat template says of the answers that its model writes. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

OPTIONS = ("enable_thinking", "thinking", "reasoning_effort")
"""Arguments of templates that switch reasoning."""


class ChatFacts(Struct, frozen=True):
    """Of a template; the defaults are those of none."""

    # One of ``SYNTAXES``.
    syntax: str = "json"
    # The template writes the list of tools itself, and calls and results in a history.
    takes_tools: bool = False
    # "tags": between those of its syntax; "open": the prompt has the first of them already.
    reasoning: str = ""
    # Those of ``OPTIONS`` that it reads.
    options: tuple[str, ...] = ()


CHANNEL = "<|channel|>"
"""Sign of templates in OpenAI's harmony format (gpt-oss)."""

HARMONY_MARKERS = frozenset(
    f"<|{name}|>" for name in ("start", "channel", "constrain", "message", "end", "call", "return")
)
"""Special tokens that structure an answer in harmony."""


class Syntax(Struct, frozen=True):
    """How a model writes calls of tools. What is inside of them is told apart by its form alone
    (``chat.calls``), as models do not always keep to theirs."""

    # Of it in a chat template.
    signs: tuple[str, ...] = ()
    # What calls are between.
    around: tuple[str, str] = ("<tool_call>", "</tool_call>")
    # How a call begins where a model leaves that out.
    bare: str = ""
    reasoning: tuple[str, str] = ("<think>", "</think>")
    # Special tokens that are part of an answer's text: without them its parts run together.
    markers: frozenset[str] = frozenset()


SYNTAXES: Mapping[str, Syntax] = {
    "harmony": Syntax((CHANNEL,), markers=HARMONY_MARKERS),
    "gemma4": Syntax(
        ("<|tool_call>",),
        ("<|tool_call>", "<tool_call|>"),
        reasoning=("<|channel>thought", "<channel|>"),
        markers=frozenset(("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')),
    ),
    "kimi-k2": Syntax(
        ("<|tool_calls_section_begin|>",),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        bare="<|tool_call_begin|>",
        markers=frozenset(
            f"<|tool_call{part}|>"
            for part in ("s_section_begin", "s_section_end", "_begin", "_argument_begin", "_end")
        ),
    ),
    "glm": Syntax(("<arg_key>",)),
    "minimax": Syntax(
        ("<minimax:tool_call>",),
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        bare='<invoke name="',
    ),
    "qwen3-coder": Syntax(("<function=",), bare="<function="),
    "hermes": Syntax(("<tool_call>",)),
    "deepseek": Syntax(
        ("tool\u2581calls\u2581begin",),
        (
            "<\uff5ctool\u2581calls\u2581begin\uff5c>",
            "<\uff5ctool\u2581calls\u2581end\uff5c>",
        ),
    ),
    "mistral": Syntax(("[TOOL_CALLS]",)),
    "llama3": Syntax(("<|python_tag|>", "ipython")),
    "json": Syntax(),
}
"""By name; those with the surest signs come first."""


def facts_of(template: str, prompt: str = "") -> ChatFacts:
    """``prompt``: a rendered conversation, up to where the assistant speaks."""
    opened = prompt.rstrip().endswith("<think>")
    thinks = "<think>" in template or "<|channel>" in template
    return ChatFacts(
        _syntax_of(template),
        re.search(r"\btools\b", template) is not None,
        "open" if opened else "tags" if thinks else "",
        tuple(name for name in OPTIONS if re.search(rf"\b{name}\b", template)),
    )


def answer_markers(template: str) -> frozenset[str]:
    """Special tokens that are part of an answer's text."""
    return SYNTAXES[_syntax_of(template)].markers


def _syntax_of(template: str) -> str:
    return next(
        (name for name, one in SYNTAXES.items() if any(sign in template for sign in one.signs)),
        "json",
    )
