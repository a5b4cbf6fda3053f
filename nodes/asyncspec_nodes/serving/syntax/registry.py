"""The families' tables by name; those with the surest signs in a template come first."""

from __future__ import annotations

from collections.abc import Mapping

from asyncspec_nodes.serving.syntax.families import (
    apertus,
    cohere,
    deepseek,
    gemma,
    glm,
    granite,
    harmony,
    hunyuan,
    kimi,
    lfm,
    llama,
    minimax,
    mistral,
    nemotron,
    olmo,
    plain,
    qwen,
    seed,
    solar,
)
from asyncspec_nodes.serving.syntax.table import Syntax

SYNTAXES: Mapping[str, Syntax] = {
    "harmony": harmony.SYNTAX,
    "gemma4": gemma.SYNTAX,
    "kimi-k2": kimi.SYNTAX,
    "solar": solar.SYNTAX,
    "apertus": apertus.SYNTAX,
    "cohere": cohere.SYNTAX,
    "deepseek-v3.2": deepseek.V32,
    "deepseek": deepseek.SYNTAX,
    "seed": seed.SYNTAX,
    "lfm2": lfm.SYNTAX,
    "glm": glm.SYNTAX,
    "minimax": minimax.SYNTAX,
    "qwen3-coder": qwen.CODER,
    "olmo3": olmo.SYNTAX,
    "nemotron": nemotron.SYNTAX,
    "hunyuan": hunyuan.SYNTAX,
    "granite": granite.SYNTAX,
    "mistral": mistral.SYNTAX,
    "hermes": qwen.HERMES,
    "llama3": llama.SYNTAX,
    "json": plain.SYNTAX,
}
"""A template without a sign of any has the last."""


def name_of(template: str) -> str:
    """The family whose syntax a chat template has."""
    return next(
        (name for name, one in SYNTAXES.items() if any(sign in template for sign in one.signs)),
        "json",
    )
