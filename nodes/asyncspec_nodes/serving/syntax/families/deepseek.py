"""DeepSeek V3, V3.1 and R1: a name and an object between marks; V3.2: tags of its own."""

import re

from asyncspec_nodes.serving.syntax.table import Form, Syntax, Tags

_CALLS, _ENDS, _BEGIN, _SEPARATOR, _END = (
    f"<\uff5ctool\u2581{part}\uff5c>"
    for part in (
        "calls\u2581begin",
        "calls\u2581end",
        "call\u2581begin",
        "sep",
        "call\u2581end",
    )
)
_DSML = "\uff5cDSML\uff5c"

SYNTAX = Syntax(
    signs=("tool\u2581calls\u2581begin",),
    around=((_CALLS, _ENDS),),
    bare=(_BEGIN,),
    between=(_END,),
    forms=(
        # V3 and R1 write ``function``, a name, and a block of code.
        Form(
            rf"{re.escape(_BEGIN)}\s*(?:function{re.escape(_SEPARATOR)}(?P<name>NAMES)\s*"
            r"```(?:json)?\s*+(?=[^\sj]))"
        ),
        Form(rf"{re.escape(_BEGIN)}\s*(?P<name>NAMES){re.escape(_SEPARATOR)}"),
    ),
    markers=frozenset((_CALLS, _ENDS, _BEGIN, _SEPARATOR, _END)),
)

V32 = Syntax(
    signs=(_DSML,),
    around=((f"<{_DSML}function_calls>", f"</{_DSML}function_calls>"),),
    bare=(f'<{_DSML}invoke name="',),
    between=(f"</{_DSML}invoke>",),
    forms=(
        Form(
            rf'<{_DSML}invoke name="(?P<name>NAMES)"\s*(?:(?P<closed>/>)|>)',
            Tags(
                begin=rf'<{_DSML}parameter name="(?P<key>[^<>"]+)"'
                r'(?:\s+string="(?P<text>true|false)")?\s*>',
                end=f"</{_DSML}parameter>",
                close=f"</{_DSML}invoke>",
                outer=f"</{_DSML}function_calls>",
            ),
        ),
    ),
    markers=frozenset((_DSML,)),
)
