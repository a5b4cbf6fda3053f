"""Nemotron Nano 2: a list of JSON in tags. (Nemotron 3 writes as Qwen3-Coder.)"""

from asyncspec_nodes.serving.syntax.table import Syntax

SYNTAX = Syntax(signs=("<TOOLCALL>",), around=(("<TOOLCALL>", "</TOOLCALL>"),))
