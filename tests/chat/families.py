"""Small chat templates that write a past turn as each family's own template does."""

from __future__ import annotations

from msgspec import Struct


class Family(Struct, frozen=True):
    """``template`` renders ``reasoning``, ``content`` and ``calls`` (``name``, ``arguments``)."""

    # Of the registry.
    syntax: str
    template: str
    # What values cannot contain: the family writes them without escapes.
    marks: tuple[str, ...] = ()
    # Calls end the answer, and have no text in front of them.
    alone: bool = False
    # Keys stand without quotes.
    bare_keys: bool = False


_THINK = "{% if reasoning %}<think>\n{{ reasoning }}\n</think>\n\n{% endif %}"
_DSML = "\uff5cDSML\uff5c"
_B, _S, _E = (f"<\uff5ctool\u2581{x}\uff5c>" for x in ("call\u2581begin", "sep", "call\u2581end"))
_CALLS, _ENDS = (f"<\uff5ctool\u2581calls\u2581{x}\uff5c>" for x in ("begin", "end"))


def _listed(begin: str, end: str, name: str = "name", arguments: str = "arguments") -> str:
    """Calls as a list of JSON."""
    return (
        "{% if calls %}" + begin + "[{% for c in calls %}"
        '{"' + name + '": {{ c.name | tojson }}, "' + arguments + '": {{ c.arguments | tojson }}}'
        "{% if not loop.last %}, {% endif %}{% endfor %}]" + end + "{% endif %}"
    )


def _each(inside: str, begin: str = "", end: str = "") -> str:
    """Calls one by one."""
    return f"{{% if calls %}}{begin}{{% for c in calls %}}{inside}{{% endfor %}}{end}{{% endif %}}"


_VALUE = "{{ v if v is string else v | tojson }}"
_TAGS = (
    "{% for k, v in c.arguments.items() %}<parameter={{ k }}>\n"
    + _VALUE
    + "\n</parameter>\n{% endfor %}"
)
_PYTHON = (
    "{{ c.name }}({% for k, v in c.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %})"
)
_OBJECT = '{"name": {{ c.name | tojson }}, "arguments": {{ c.arguments | tojson }}}'


def _bare(quote: str) -> str:
    """Calls of Gemma's: objects with bare keys, and texts between ``quote``."""
    return (
        "{% macro written(v) %}{% if v is string %}"
        + quote
        + "{{ v }}"
        + quote
        + "{% elif v is mapping %}{{ '{' }}{% for k, x in v.items() %}{{ k }}:{{ written(x) }}"
        "{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}"
        "{% elif v is sequence %}[{% for x in v %}{{ written(x) }}"
        "{% if not loop.last %},{% endif %}{% endfor %}]"
        "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
    )


_BARE_CALL = "call:{{ c.name }}{{ written(c.arguments) }}"
_NEXT = "<|start|>assistant"

FAMILIES = {
    "gpt-oss": Family(
        "harmony",
        "{% if reasoning %}<|channel|>analysis<|message|>{{ reasoning }}<|end|>"
        f"{{% if content or calls %}}{_NEXT}{{% endif %}}{{% endif %}}"
        "{% if content and calls %}<|channel|>commentary<|message|>{{ content }}<|end|>"
        f"{_NEXT}"
        "{% elif content %}<|channel|>final<|message|>{{ content }}<|return|>{% endif %}"
        + _each(
            " to=functions.{{ c.name }}<|channel|>commentary json<|message|>"
            f"{{{{ c.arguments | tojson }}}}<|call|>{{% if not loop.last %}}{_NEXT}{{% endif %}}"
        ),
    ),
    "Gemma 4": Family(
        "gemma4",
        _bare('<|"|>')
        + "{% if reasoning %}<|channel>thought\n{{ reasoning }}\n<channel|>{% endif %}{{ content }}"
        + _each(f"<|tool_call>{_BARE_CALL}<tool_call|>"),
        bare_keys=True,
    ),
    "FunctionGemma": Family(
        "gemma4",
        _bare("<escape>")
        + "{{ content }}"
        + _each(f"<start_function_call>{_BARE_CALL}<end_function_call>"),
        bare_keys=True,
    ),
    "Qwen 2.5 and 3, EXAONE 4, SmolLM3": Family(
        "hermes", _THINK + "{{ content }}" + _each(f"\n<tool_call>\n{_OBJECT}\n</tool_call>")
    ),
    "Qwen3-Coder, Qwen 3.5, Nemotron 3": Family(
        "qwen3-coder",
        _THINK
        + "{{ content }}"
        + _each("\n<tool_call>\n<function={{ c.name }}>\n" + _TAGS + "</function>\n</tool_call>"),
        ("<",),
    ),
    "Mistral, lists": Family("mistral", "{{ content }}" + _listed("[TOOL_CALLS]", "")),
    "Mistral, names; Magistral": Family(
        "mistral",
        "{% if reasoning %}[THINK]{{ reasoning }}[/THINK]{% endif %}{{ content }}"
        + _each("[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}"),
    ),
    "Seed-OSS": Family(
        "seed",
        "{% if reasoning %}<seed:think>{{ reasoning }}</seed:think>{% endif %}{{ content }}"
        + _each(
            "\n<seed:tool_call>\n<function={{ c.name }}>\n"
            + _TAGS.replace("\n" + _VALUE + "\n", _VALUE)
            + "</function>\n</seed:tool_call>"
        ),
        ("<",),
    ),
    "Cohere Command": Family(
        "cohere",
        "{% if reasoning %}<|START_THINKING|>{{ reasoning }}<|END_THINKING|>{% endif %}"
        "{% if content %}<|START_RESPONSE|>{{ content }}<|END_RESPONSE|>{% endif %}"
        + _listed("<|START_ACTION|>", "<|END_ACTION|>", "tool_name", "parameters"),
    ),
    "OLMo 3": Family(
        "olmo3",
        _THINK + "{{ content }}" + _each(_PYTHON + "\n", "<function_calls>\n", "</function_calls>"),
    ),
    "MiniMax M2": Family(
        "minimax",
        _THINK
        + "{{ content }}"
        + _each(
            '<invoke name="{{ c.name }}">\n{% for k, v in c.arguments.items() %}'
            '<parameter name="{{ k }}">' + _VALUE + "</parameter>\n{% endfor %}</invoke>\n",
            "\n<minimax:tool_call>\n",
            "</minimax:tool_call>",
        ),
        ("<",),
    ),
    "MiniMax M1": Family(
        "hunyuan",
        _THINK + "{{ content }}" + _each(_OBJECT + "\n", "\n<tool_calls>\n", "</tool_calls>"),
    ),
    "Kimi K2": Family(
        "kimi-k2",
        _THINK
        + "{{ content }}"
        + _each(
            "<|tool_call_begin|>functions.{{ c.name }}:{{ loop.index0 }}"
            "<|tool_call_argument_begin|>{{ c.arguments | tojson }}<|tool_call_end|>",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
        ),
    ),
    "DeepSeek V3, R1": Family(
        "deepseek",
        _THINK
        + "{{ content }}"
        + _each(
            _B + "function" + _S + "{{ c.name }}\n```json\n{{ c.arguments | tojson }}\n```" + _E,
            _CALLS,
            _ENDS,
        ),
    ),
    "DeepSeek V3.1": Family(
        "deepseek",
        _THINK
        + "{{ content }}"
        + _each(_B + "{{ c.name }}" + _S + "{{ c.arguments | tojson }}" + _E, _CALLS, _ENDS),
    ),
    "DeepSeek V3.2": Family(
        "deepseek-v3.2",
        _THINK
        + "{{ content }}"
        + _each(
            f'<{_DSML}invoke name="{{{{ c.name }}}}">\n'
            "{% for k, v in c.arguments.items() %}"
            f'<{_DSML}parameter name="{{{{ k }}}}" '
            "string=\"{{ 'true' if v is string else 'false' }}\">"
            + _VALUE
            + f"</{_DSML}parameter>\n{{% endfor %}}</{_DSML}invoke>\n",
            f"\n\n<{_DSML}function_calls>\n",
            f"</{_DSML}function_calls>",
        ),
        ("<",),
    ),
    "GLM from 4.5 on": Family(
        "glm",
        _THINK
        + "{{ content }}"
        + _each(
            "\n<tool_call>{{ c.name }}\n{% for k, v in c.arguments.items() %}"
            "<arg_key>{{ k }}</arg_key>\n<arg_value>" + _VALUE + "</arg_value>\n{% endfor %}"
            "</tool_call>"
        ),
        ("<",),
    ),
    "Llama 3": Family(
        "llama3",
        "{% if calls %}"
        + _each(
            '{"name": {{ c.name | tojson }}, "parameters": {{ c.arguments | tojson }}}'
            "{% if not loop.last %}; {% endif %}"
        )
        + "{% else %}{{ content }}{% endif %}{# ipython #}",
        alone=True,
    ),
    "Llama 3.2 and 4, pythonic": Family(
        "llama3",
        "{{ content }}"
        + _each(
            _PYTHON + "{% if not loop.last %}, {% endif %}", "<|python_start|>[", "]<|python_end|>"
        ),
    ),
    "Granite 3": Family(
        "granite",
        "{% if reasoning %}<think>{{ reasoning }}</think>{% endif %}"
        "{% if content %}<response>{{ content }}</response>{% endif %}"
        + _listed("<|tool_call|>", ""),
    ),
    "Phi 4 mini": Family("granite", "{{ content }}" + _listed("<|tool_call|>", "<|/tool_call|>")),
    "Hunyuan": Family(
        "hunyuan",
        "{% if reasoning %}<think>\n{{ reasoning }}\n</think>\n{% endif %}"
        "<answer>\n{{ content }}" + _listed("\n<tool_calls>", "</tool_calls>") + "\n</answer>",
    ),
    "Nemotron Nano 2": Family(
        "nemotron", _THINK + "{{ content }}" + _listed("<TOOLCALL>", "</TOOLCALL>")
    ),
    "LFM2": Family(
        "lfm2",
        "{{ content }}"
        + _each(
            _PYTHON + "{% if not loop.last %}, {% endif %}",
            "<|tool_call_start|>[",
            "]<|tool_call_end|>",
        ),
    ),
    "Apertus": Family(
        "apertus",
        "{% if reasoning %}<|inner_prefix|>{{ reasoning }}<|inner_suffix|>{% endif %}{{ content }}"
        + _each(
            "{{ '{' }}{{ c.name | tojson }}: {{ c.arguments | tojson }}{{ '}' }}"
            "{% if not loop.last %}, {% endif %}",
            "<|tools_prefix|>[",
            "]<|tools_suffix|>",
        ),
    ),
    "Solar Open": Family(
        "solar",
        "{% if reasoning %}<|think|>{{ reasoning }}<|end|><|begin|>assistant{% endif %}"
        "<|content|>{{ content }}<|end|>"
        + _each(
            "<|tool_call:begin|>id{{ loop.index }}<|tool_call:name|>{{ c.name }}"
            "<|tool_call:args|>{{ c.arguments | tojson }}<|tool_call:end|>",
            "<|begin|>assistant<|tool_calls|>",
            "<|calls|>",
        ),
    ),
    "Ernie 4.5": Family(
        "hermes",
        _THINK
        + "{% if content %}<response>\n{{ content }}\n</response>\n{% endif %}"
        + _each(f"<tool_call>\n{_OBJECT}\n</tool_call>\n"),
    ),
    "xLAM": Family(
        "json",
        "{% if calls %}" + _listed("", "") + "{% else %}{{ content }}{% endif %}",
        alone=True,
    ),
}
