"""Llama 3 as JSON, Llama 3.2 and 4 as a list of Python's calls."""

from asyncspec_nodes.serving.syntax.table import Form, Syntax

PYTHON = Form(r"(?P<name>NAMES)\(", "python")

SYNTAX = Syntax(
    signs=("<|python_tag|>", "<|python_start|>", "ipython"),
    around=(("<|python_tag|>", ""), ("<|python_start|>", "<|python_end|>")),
    forms=(PYTHON,),
    markers=frozenset(("<|python_tag|>", "<|python_start|>", "<|python_end|>")),
)
