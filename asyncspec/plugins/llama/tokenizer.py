"""The tokenizer of a GGUF file, as llama.cpp reads it, and its chat template."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from asyncspec.backend.chat_templates import by_name, used
from asyncspec.backend.infill import NO_INFILL
from asyncspec.backend.template_worker import TemplateWorker
from asyncspec.core.errors import CheckpointError
from asyncspec.plugins.llama.cut import VirtualFile
from asyncspec.plugins.llama.library import load_model
from asyncspec.plugins.llama.target import OpenTarget, control_tokens, vocabulary

_BYTE, _CONTROL, _UNKNOWN = 1 << 5, 1 << 3, 1 << 0
"""Bits of ``enum llama_token_attr``."""

_SENTENCEPIECE = 1
"""Member of ``enum llama_vocab_type``."""


class LlamaTokenizer:
    decodes_as_whole = False

    def __init__(self, target: OpenTarget, template: str | None = None) -> None:
        model = target.model
        if not vocabulary(model):
            raise CheckpointError(f"{target.path} has no vocabulary; use a file that has one")
        self._model = load_model(VirtualFile(model.metadata, {}), str(target.path), vocab_only=True)
        self._bound, self._vocab = self._model.bound, self._model.vocab
        self._size = self._model.vocab_size
        self._control = control_tokens(model)
        self._space_prefix = model.get(
            "tokenizer.ggml.add_space_prefix",
            self._bound.llama_vocab_type(self._vocab) == _SENTENCEPIECE,
        )
        self._templates = by_name(template) or _templates(model)
        names = {
            f"{name}_token": self.spell(token).decode(errors="replace")
            for name in ("bos", "eos", "unknown", "padding")
            if (token := model.get(f"tokenizer.ggml.{name}_token_id")) is not None
        }
        self._write = TemplateWorker(
            "asyncspec.plugins.llama.templates:make", self._templates, names
        )

    @property
    def has_template(self) -> bool:
        return bool(self._templates)

    def encode(self, text: str) -> tuple[int, ...]:
        """See ``Tokenizer``, with the special tokens that the file says begin a text."""
        return self._encoded(text, special=True)

    def encode_bare(self, text: str) -> tuple[int, ...]:
        """See ``BareTokenizer``."""
        return self._encoded(text, special=False)

    def _encoded(self, text: str, *, special: bool) -> tuple[int, ...]:
        data = text.encode()
        max_tokens = len(data) + 16
        tokens = (ctypes.c_int32 * max_tokens)()
        count = self._bound.llama_tokenize(
            self._vocab, data, len(data), tokens, max_tokens, special, True
        )
        if count < 0:
            raise ValueError("the tokenizer cannot read this text")
        return tuple(tokens[:count])

    def infill(self, prefix: str, suffix: str) -> tuple[int, ...]:
        """See ``InfillTokenizer``: by what the file states, or llama.cpp knows by name. Raises
        ``ValueError``."""
        kinds = (self._bound.llama_vocab_fim_pre, self._bound.llama_vocab_fim_suf)
        prefix_mark, suffix_mark = (kind(self._vocab) for kind in kinds)
        middle_mark = self._bound.llama_vocab_fim_mid(self._vocab)
        if min(prefix_mark, suffix_mark, middle_mark) < 0:
            raise ValueError(NO_INFILL)
        begins = self._bound.llama_vocab_get_add_bos(self._vocab)
        begin = (self._bound.llama_vocab_bos(self._vocab),) if begins else ()
        first, last = (self._encoded(text, special=False) for text in (prefix, suffix))
        return (*begin, prefix_mark, *first, suffix_mark, *last, middle_mark)

    @property
    def template(self) -> str:
        return used(self._templates)

    def render(self, chat: str) -> tuple[int, ...]:
        return self._encoded(self.prompt(chat), special=False)

    def prompt(self, chat: str) -> str:
        if not self._templates:
            raise ValueError(
                "the target's file has no chat template; ask for a plain completion (run "
                "--no-chat, without --system), or give a template (serve --chat-template FILE)"
            )
        return self._write(chat)

    def close(self) -> None:
        self._write.close()

    def decode(self, ids: Sequence[int]) -> str:
        # ``llama_detokenize`` also deletes spaces before punctuation that comes later: streamed
        # text would change. llama.cpp's server shows tokens one by one, as here.
        visible = [i for i in ids if 0 <= i < self._size and not self.is_special(i)]
        pieces = [*map(self.spell, visible)]
        if pieces and self._space_prefix:
            pieces[0] = pieces[0].removeprefix(b" ")
        return b"".join(pieces).decode(errors="replace")

    def spell(self, token: int) -> bytes:
        if not 0 <= token < self._size:
            return b""

        def put(buffer: Any, size: int) -> int:
            count: int = self._bound.llama_token_to_piece(self._vocab, token, buffer, size, 0, True)
            return count

        return _filled(put, 64)

    def is_special(self, token: int) -> bool:
        return token in self._control or bool(self._attributes(token) & (_CONTROL | _UNKNOWN))

    def is_byte(self, token: int) -> bool:
        return bool(self._attributes(token) & _BYTE)

    def _attributes(self, token: int) -> int:
        if not 0 <= token < self._size:
            return 0
        attributes: int = self._bound.llama_vocab_get_attr(self._vocab, token)
        return attributes


def _filled(put: Callable[[Any, int], int], size: int) -> bytes:
    """What ``put`` writes in a buffer; a negative result is the size that it needs."""
    buffer = ctypes.create_string_buffer(size)
    count = put(buffer, size)
    if count < 0:
        buffer = ctypes.create_string_buffer(-count)
        count = put(buffer, -count)
    return buffer.raw[:count]


def _templates(model: Any) -> dict[str, str]:
    """Those of a file: one, and more by name."""
    names = model.get("tokenizer.chat_templates") or ()
    more = {name: model.get(f"tokenizer.chat_template.{name}") for name in names}
    templates = by_name(model.get("tokenizer.chat_template"))
    return templates | {name: text for name, text in more.items() if text}
