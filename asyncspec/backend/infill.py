"""Prompts of models that fill a text in between its beginning and its end."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

INFILL_TOKENS = (
    # Qwen, CodeGemma.
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    # StarCoder, Granite.
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    # DeepSeek.
    (
        "<\uff5cfim\u2581begin\uff5c>",
        "<\uff5cfim\u2581hole\uff5c>",
        "<\uff5cfim\u2581end\uff5c>",
    ),
    # Code Llama.
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
    # GLM.
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
)
"""What stands before the beginning, before the end, and before the answer, by family."""

NO_INFILL = "the target's tokenizer has no tokens for filling in; leave suffix out"


@runtime_checkable
class InfillTokenizer(Protocol):
    """A ``Tokenizer`` that may have such tokens."""

    def infill(self, prefix: str, suffix: str) -> tuple[int, ...]:
        """The prompt for what stands between two texts: prefix, suffix, middle. Raises
        ``ValueError`` where there are no tokens for it."""
