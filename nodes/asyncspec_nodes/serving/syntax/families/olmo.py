"""OLMo 3: Python's calls, one a line."""

from asyncspec_nodes.serving.syntax.families.llama import PYTHON
from asyncspec_nodes.serving.syntax.table import Syntax

SYNTAX = Syntax(
    signs=("<function_calls>",),
    around=(("<function_calls>", "</function_calls>"),),
    forms=(PYTHON,),
)
