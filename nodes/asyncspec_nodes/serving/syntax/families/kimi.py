"""Kimi K2: ``functions.NAME:NUMBER``, and the arguments behind a mark."""

from asyncspec_nodes.serving.syntax.table import Form, Syntax

SYNTAX = Syntax(
    signs=("<|tool_calls_section_begin|>",),
    around=(("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),),
    bare=("<|tool_call_begin|>",),
    between=("<|tool_call_end|>",),
    forms=(
        Form(
            r"<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>NAMES)(?::\d+)?"
            r"\s*<\|tool_call_argument_begin\|>"
        ),
    ),
    reasoning=(("<think>", "</think>"), ("\u25c1think\u25b7", "\u25c1/think\u25b7")),
    markers=frozenset(
        f"<|tool_call{part}|>"
        for part in ("s_section_begin", "s_section_end", "_begin", "_argument_begin", "_end")
    ),
)
