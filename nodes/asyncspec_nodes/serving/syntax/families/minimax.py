"""MiniMax M2: ``<invoke>`` and ``<parameter>``; M1: a line of JSON for each call."""

from asyncspec_nodes.serving.syntax.table import Form, Syntax, Tags

SYNTAX = Syntax(
    signs=("<minimax:tool_call>", "MiniMax"),
    around=(
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        ("<tool_calls>", "</tool_calls>"),
    ),
    bare=('<invoke name="',),
    between=("</invoke>",),
    forms=(
        Form(
            r'<invoke name="(?P<name>NAMES)"\s*(?:(?P<closed>/>)|>)',
            Tags(close="</invoke>", outer="</minimax:tool_call>"),
        ),
    ),
)
