"""Hunyuan A13B: a list of JSON in tags; the answer is in tags too."""

from asyncspec_nodes.serving.syntax.table import Syntax

SYNTAX = Syntax(
    signs=("<tool_calls>",),
    around=(("<tool_calls>", "</tool_calls>"),),
    wraps=(("<answer>", "</answer>"),),
)
