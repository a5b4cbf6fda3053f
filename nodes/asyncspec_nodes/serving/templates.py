"""What a chat template says of the answers that its model writes. Pure."""

from __future__ import annotations

import re
from typing import Literal

from msgspec import Struct

Syntax = Literal[
    "harmony",
    "gemma4",
    "glm",
    "minimax",
    "hermes",
    "qwen3-coder",
    "deepseek",
    "mistral",
    "llama3",
    "json",
]
"""How a model writes calls of tools."""

OPTIONS = ("enable_thinking", "thinking", "reasoning_effort")
"""Arguments of templates that switch reasoning."""


class ChatFacts(Struct, frozen=True):
    """Of a template; the defaults are those of none."""

    syntax: str = "json"
    # The template writes the list of tools itself, and calls and results in a history.
    takes_tools: bool = False
    # "tags": ``<think>`` and ``</think>``; "open": the prompt has the first of them already.
    reasoning: str = ""
    # Those of ``OPTIONS`` that it reads.
    options: tuple[str, ...] = ()


CHANNEL = "<|channel|>"
"""Sign of templates in OpenAI's harmony format (gpt-oss)."""

HARMONY_MARKERS = frozenset(
    f"<|{name}|>" for name in ("start", "channel", "constrain", "message", "end", "call", "return")
)
"""Special tokens that structure an answer in harmony."""

GEMMA_MARKERS = frozenset(("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'))
"""The same of Gemma 4."""

_SYNTAXES: tuple[tuple[str, Syntax], ...] = (
    (CHANNEL, "harmony"),
    ("<|tool_call>", "gemma4"),
    ("<arg_key>", "glm"),
    ("<minimax:tool_call>", "minimax"),
    ("<function=", "qwen3-coder"),
    ("<tool_call>", "hermes"),
    ("tool\u2581calls\u2581begin", "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3"),
    ("ipython", "llama3"),
)
"""Signs of a syntax in a template, the surest first."""


def facts_of(template: str, prompt: str = "") -> ChatFacts:
    """``prompt``: a rendered conversation, up to where the assistant speaks."""
    syntax = next((name for sign, name in _SYNTAXES if sign in template), "json")
    opened = prompt.rstrip().endswith("<think>")
    thinks = "<think>" in template or "<|channel>" in template
    return ChatFacts(
        syntax,
        re.search(r"\btools\b", template) is not None,
        "open" if opened else "tags" if thinks else "",
        tuple(name for name in OPTIONS if re.search(rf"\b{name}\b", template)),
    )


def answer_markers(template: str) -> frozenset[str]:
    """Special tokens that are part of an answer's text: without them its parts run together."""
    if CHANNEL in template:
        return HARMONY_MARKERS
    return GEMMA_MARKERS if "<|tool_call>" in template else frozenset()
