"""Mistral, Ministral, Magistral: a list of JSON; later, names and objects."""

from asyncspec_nodes.serving.syntax.table import Form, Syntax

SYNTAX = Syntax(
    signs=("[TOOL_CALLS]", "[THINK]", "[AVAILABLE_TOOLS]"),
    around=(("[TOOL_CALLS]", ""),),
    forms=(Form(r"(?P<name>NAMES)(?:\[CALL_ID\][^\[{]*+)?\s*(?:\[ARGS\]|(?=\{))"),),
    reasoning=(("[THINK]", "[/THINK]"), ("<think>", "</think>")),
    markers=frozenset(("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")),
)
