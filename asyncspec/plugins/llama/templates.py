"""Chat templates of GGUF files, in the process that writes conversations by them: Jinja with what
transformers adds to it. Imports nothing of llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any

import msgspec

from asyncspec.backend.template_worker import Render, Templates, renderer


def make(argument: bytes) -> Callable[[bytes], bytes]:
    """See ``template_worker.renderer``."""
    from jinja2.exceptions import TemplateError

    def refuse(why: str) -> None:
        raise TemplateError(why)

    def now(form: str) -> str:
        return datetime.now().strftime(form)

    def with_tokens(templates: Templates) -> Render:
        fixed = {"raise_exception": refuse, "strftime_now": now, **templates.tokens}

        def render(
            template: str,
            messages: list[dict[str, Any]],
            tools: list[Any] | None,
            options: dict[str, Any],
        ) -> str:
            continues = options.pop(CONTINUES, False)
            said = {"messages": messages, "tools": tools, "add_generation_prompt": True, **options}
            text = str(_compiled(template).render({**said, **fixed}))
            return _open_ended(text, messages[-1].get("content")) if continues else text

        return render

    tokens = msgspec.msgpack.decode(argument, type=Templates).tokens
    reserved = frozenset({"messages", "tools", "raise_exception", "strftime_now", *tokens})
    return renderer(argument, with_tokens, reserved)


CONTINUES = "continue_final_message"
"""The argument of transformers' ``apply_chat_template``."""


def _open_ended(text: str, content: object) -> str:
    """A conversation's text up to the end of its last message, as transformers cuts it. Raises
    ``ValueError`` where the template does not write that message."""
    if isinstance(content, list):
        content = content[-1].get("text") if content else None
    final = content if isinstance(content, str) else ""
    place = text.rfind(final.strip())
    if place < 0:
        raise ValueError(f"{CONTINUES}: it does not write the last message as it is")
    whole = final.lstrip()
    end = place + len(whole)
    return text[:end] if text[place:end] == whole else text[: place + len(final.strip())]


@lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    """A template of Jinja with what transformers adds to it."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Marks the assistant's text, for training; here it is text like any other."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _json
    return environment.from_string(template)


def _json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own, without escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
