"""GLM from 4.5 on: keys and values in tags; GLM-4: a name, and an object in the next line."""

from asyncspec_nodes.serving.syntax.table import Form, Syntax, Tags

SYNTAX = Syntax(
    signs=("<arg_key>",),
    around=(("<tool_call>", "</tool_call>"),),
    forms=(
        Form(
            r"(?P<name>NAMES)\s*(?=<arg_key>|</tool_call>)",
            Tags(
                begin=r"<arg_key>\s*(?P<key>[^<]+?)\s*</arg_key>\s*<arg_value>",
                end="</arg_value>",
                close="(?=</tool_call>)",
            ),
        ),
        Form(r"(?P<name>NAMES)\n(?=\{)"),
    ),
)
