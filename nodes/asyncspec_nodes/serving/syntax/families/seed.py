"""Seed-OSS: Qwen3-Coder's tags, values without line breaks around them."""

from asyncspec_nodes.serving.syntax.families.qwen import FUNCTION
from asyncspec_nodes.serving.syntax.table import Form, Syntax, Tags

SYNTAX = Syntax(
    signs=("<seed:tool_call>", "<seed:think>"),
    around=(("<seed:tool_call>", "</seed:tool_call>"),),
    bare=("<function=",),
    between=("</function>",),
    forms=(
        Form(rf"{FUNCTION}>\s*(?=\{{)"),
        Form(rf"{FUNCTION}(?:(?P<closed>/>)|>(?=\s*+[^\s{{]))", Tags(outer="</seed:tool_call>")),
    ),
    reasoning=(("<seed:think>", "</seed:think>"),),
)
