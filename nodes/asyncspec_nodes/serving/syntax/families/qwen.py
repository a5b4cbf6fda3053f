"""Qwen 2.5 and 3 (and many others): an object of JSON; Qwen3-Coder, 3.5 and Nemotron 3: tags."""

from asyncspec_nodes.serving.syntax.table import Form, Pair, Syntax, Tags

AROUND: Pair = ("<tool_call>", "</tool_call>")

FUNCTION = r"""<function\s*=\s*["']?(?P<name>NAMES)["']?\s*"""
"""A call's tag, up to its end."""

HERMES = Syntax(
    signs=("<tool_call>",),
    around=(AROUND,),
    # EXAONE Deep, Ernie 4.5 and Granite 4 write calls this way as well.
    reasoning=(("<think>", "</think>"), ("<thought>", "</thought>")),
    wraps=(("<response>", "</response>"),),
)

CODER = Syntax(
    signs=("<function=",),
    around=(AROUND,),
    bare=("<function=",),
    between=("</function>",),
    forms=(
        # Llama 3.1 writes an object between the same tags.
        Form(rf"{FUNCTION}>\s*(?=\{{)"),
        Form(rf"{FUNCTION}(?:(?P<closed>/>)|>(?=\s*+[^\s{{]))", Tags(padded=True)),
    ),
)
