"""The tokenizer of a GGUF file, as llama.cpp reads it, and its chat template."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from asyncspec.backend.llama.cut import VirtualFile
from asyncspec.backend.llama.library import load_model
from asyncspec.backend.llama.target import TOKENS, OpenTarget
from asyncspec.backend.tokenizer import conversation
from asyncspec.core.errors import CheckpointError, first_line

_BYTE, _CONTROL = 1 << 5, 1 << 3
"""Of ``enum llama_token_attr``."""


class LlamaTokenizer:
    decodes_as_whole = False

    def __init__(self, target: OpenTarget, template: str | None = None) -> None:
        model = target.model
        if not model.get(TOKENS):
            raise CheckpointError(f"{target.path} has no vocabulary; use a file that has one")
        self._model = load_model(VirtualFile(model.metadata, {}), str(target.path), vocab_only=True)
        self._bound, self._vocab = self._model.bound, self._model.vocab
        self._size = self._model.vocab_size
        self._template = template or model.get("tokenizer.chat_template")
        self._names = {
            f"{name}_token": self.spell(token).decode(errors="replace")
            for name in ("bos", "eos", "unknown", "padding")
            if (token := model.get(f"tokenizer.ggml.{name}_token_id")) is not None
        }

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str) -> tuple[int, ...]:
        """See ``Tokenizer``, with the special tokens that the file says begin a text."""
        return self._encoded(text, special=True)

    def _encoded(self, text: str, *, special: bool) -> tuple[int, ...]:
        data = text.encode()
        most = len(data) + 16
        found = (ctypes.c_int32 * most)()
        count = self._bound.llama_tokenize(self._vocab, data, len(data), found, most, special, True)
        if count < 0:
            raise ValueError("the tokenizer cannot read this text")
        return tuple(found[:count])

    @property
    def template(self) -> str:
        return self._template or ""

    def render(self, chat: str) -> tuple[int, ...]:
        return self._encoded(self.prompt(chat), special=False)

    def prompt(self, chat: str) -> str:
        if self._template is None:
            raise ValueError(
                "the target's file has no chat template; ask for a plain completion (run "
                "--no-chat, without --system), or give a template (serve --chat-template FILE)"
            )
        try:
            return _rendered(self._template, chat, self._names)
        except Exception as error:  # a template is a foreign program
            why = first_line(error)
            raise ValueError(f"the chat template refuses these messages: {why}") from error

    def decode(self, ids: Sequence[int]) -> str:
        known = [token for token in ids if 0 <= token < self._size]
        tokens = (ctypes.c_int32 * len(known))(*known)

        def put(buffer: Any, size: int) -> int:
            count: int = self._bound.llama_detokenize(
                self._vocab, tokens, len(known), buffer, size, False, False
            )
            return count

        return _filled(put, 16 * len(known) + 16).decode(errors="replace")

    def spell(self, token: int) -> bytes:
        if not 0 <= token < self._size:
            return b""

        def put(buffer: Any, size: int) -> int:
            count: int = self._bound.llama_token_to_piece(self._vocab, token, buffer, size, 0, True)
            return count

        return _filled(put, 64)

    def is_special(self, token: int) -> bool:
        return bool(self._attributes(token) & _CONTROL) and not self.decode((token,))

    def is_byte(self, token: int) -> bool:
        return bool(self._attributes(token) & _BYTE)

    def _attributes(self, token: int) -> int:
        if not 0 <= token < self._size:
            return 0
        found: int = self._bound.llama_vocab_get_attr(self._vocab, token)
        return found


def _filled(put: Callable[[Any, int], int], size: int) -> bytes:
    """What ``put`` writes in a buffer; a negative result is the size that it needs."""
    buffer = ctypes.create_string_buffer(size)
    count = put(buffer, size)
    if count < 0:
        buffer = ctypes.create_string_buffer(-count)
        count = put(buffer, -count)
    return buffer.raw[:count]


def _rendered(template: str, chat: str, names: dict[str, str]) -> str:
    """A conversation by a Jinja template, up to where the assistant speaks."""
    from jinja2.exceptions import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(why: str) -> None:
        raise TemplateError(why)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **how: json.dumps(
        value, **{"ensure_ascii": False, **how}
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    messages, tools, options = conversation(chat)
    whole = {"messages": messages, "tools": tools, "add_generation_prompt": True, **names}
    return environment.from_string(template).render({**whole, **options})
