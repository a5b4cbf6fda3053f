"""Cohere's Command R7B, A and later."""

from asyncspec_nodes.serving.syntax.table import Syntax

_WRAPS = tuple((f"<|START_{name}|>", f"<|END_{name}|>") for name in ("RESPONSE", "TEXT"))
_ACTION = ("<|START_ACTION|>", "<|END_ACTION|>")
_THINKING = ("<|START_THINKING|>", "<|END_THINKING|>")

SYNTAX = Syntax(
    signs=(_ACTION[0], _THINKING[0], _WRAPS[0][0]),
    around=(_ACTION,),
    reasoning=(_THINKING,),
    wraps=_WRAPS,
    markers=frozenset(mark for pair in (*_WRAPS, _ACTION, _THINKING) for mark in pair),
)
