"""Granite 3 and Phi 4 mini: a list of JSON behind a mark, which Phi also ends."""

from asyncspec_nodes.serving.syntax.table import Syntax

SYNTAX = Syntax(
    signs=("<|tool_call|>",),
    around=(("<|tool_call|>", "<|/tool_call|>"), ("functools", "")),
    reasoning=(
        ("<think>", "</think>"),
        ("Here is my thought process:", "Here is my response:"),
    ),
    wraps=(("<response>", "</response>"),),
    markers=frozenset(("<|tool_call|>", "<|/tool_call|>")),
)
