"""Gemma 4, and FunctionGemma: objects without quotes around keys, with marks around texts."""

from asyncspec_nodes.serving.syntax.table import Form, Syntax

SYNTAX = Syntax(
    signs=("<|tool_call>", "<start_function_call>"),
    around=(
        ("<|tool_call>", "<tool_call|>"),
        ("<start_function_call>", "<end_function_call>"),
    ),
    forms=(Form(r"call:(?P<name>NAMES)\s*(?=\{)"),),
    reasoning=(("<|channel>thought", "<channel|>"),),
    markers=frozenset(
        ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<escape>")
    ),
)
