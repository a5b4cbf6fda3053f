"""Apertus: a list of objects with the tool's name as their only key."""

from asyncspec_nodes.serving.syntax.table import Form, Syntax

_TOOLS = ("<|tools_prefix|>", "<|tools_suffix|>")
_INNER = ("<|inner_prefix|>", "<|inner_suffix|>")

SYNTAX = Syntax(
    signs=_TOOLS[:1],
    around=(_TOOLS,),
    forms=(Form(r'\{\s*+"(?P<name>NAMES)"\s*+:\s*+(?=\{)', own=True),),
    reasoning=(_INNER,),
    markers=frozenset((*_TOOLS, *_INNER)),
)
