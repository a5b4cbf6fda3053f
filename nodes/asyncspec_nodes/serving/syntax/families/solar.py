"""Solar Open: messages of the assistant, each behind what it is."""

from asyncspec_nodes.serving.syntax.table import Form, Syntax

_BEGIN = "<|begin|>assistant"

SYNTAX = Syntax(
    signs=("<|tool_call:begin|>",),
    around=((f"{_BEGIN}<|tool_calls|>", "<|calls|>"), ("<|tool_calls|>", "<|calls|>")),
    bare=("<|tool_call:begin|>",),
    between=("<|tool_call:end|>",),
    forms=(
        Form(r"<\|tool_call:begin\|>[^<]*+<\|tool_call:name\|>(?P<name>NAMES)<\|tool_call:args\|>"),
    ),
    reasoning=(("<|think|>", "<|end|>"),),
    wraps=((f"{_BEGIN}<|content|>", "<|end|>"), ("<|content|>", "<|end|>")),
    markers=frozenset(
        (
            *("<|begin|>", "<|think|>", "<|content|>", "<|end|>", "<|tool_calls|>", "<|calls|>"),
            *(f"<|tool_call:{part}|>" for part in ("begin", "name", "args", "end")),
        )
    ),
)
