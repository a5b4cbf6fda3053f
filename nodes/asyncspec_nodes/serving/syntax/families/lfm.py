"""LFM2: a list of Python's calls."""

from asyncspec_nodes.serving.syntax.families.llama import PYTHON
from asyncspec_nodes.serving.syntax.table import Syntax

_AROUND = ("<|tool_call_start|>", "<|tool_call_end|>")

SYNTAX = Syntax(signs=_AROUND[:1], around=(_AROUND,), forms=(PYTHON,), markers=frozenset(_AROUND))
