"""JSON as a whole answer (xLAM, and templates that know no tools), also as a block of code."""

from asyncspec_nodes.serving.syntax.table import Form, Syntax

_OPEN = r'"(?:[^"\\]++|\\.)*+"'
_PAIRS = (
    r'(?:"(?!(?:name|tool_name|arguments|parameters|function)")[^"\\]*+"\s*+:\s*+'
    rf"(?:{_OPEN}|[-+.\w]++)\s*+,\s*+)*+"
)
"""Text of an object in front of what counts."""

SYNTAX = Syntax(
    forms=(
        Form(
            rf'\{{{{1,2}}+\s*+{_PAIRS}(?:"function"\s*+:\s*+(?:\{{\s*+{_PAIRS})?)?'
            rf'(?:"(?:name|tool_name)"\s*+:\s*+)?"(?:functions\.)?(?P<name>NAMES)"\s*+,\s*+{_PAIRS}'
            r'"(?:arguments|parameters)"\s*+:\s*+(?=[{"nN\[}])'
        ),
    )
)
