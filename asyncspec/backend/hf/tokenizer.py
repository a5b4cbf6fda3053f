"""The target's own tokenizer, as Hugging Face loads it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncspec.core.errors import CheckpointError, first_line

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def _byte_letters() -> dict[str, int]:
    """What byte-level vocabularies write for each byte: printable Latin-1 characters as they are,
    the others as the characters from 256 on, in order (GPT-2's table)."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _byte_letters()


class HFTokenizer:
    """Text to tokens and back. A ``Codec`` for ``text.Detokenizer``."""

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        """``template``: a chat template (Jinja) in place of the tokenizer's own."""
        self._tokenizer = tokenizer
        self._template = template or tokenizer.chat_template
        added = tokenizer.added_tokens_decoder
        self._special = {*tokenizer.all_special_ids, *(i for i, t in added.items() if t.special)}
        self._left_out: dict[int, bool] = {}
        self._loose: dict[int, bool] = {}
        self._spelled: dict[int, bytes] = {}
        # The first text makes transformers set the tokenizer up, which it refuses to have done
        # while another thread uses it.
        self.encode("a")

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template."""
        return self._template is not None

    @property
    def reshapes(self) -> bool:
        """See ``Codec``. Only WordPiece vocabularies clean up the spaces before punctuation."""
        return bool(self._tokenizer.clean_up_tokenization_spaces) and self._model != "BPE"

    @property
    def _model(self) -> str:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return type(backend.model).__name__ if backend is not None else ""

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of a prompt with the tokenizer's usual special tokens, no chat template."""
        return tuple(self._tokenizer(text)["input_ids"])

    def render(self, chat: str) -> tuple[int, ...]:
        """Tokens of a conversation, a JSON list of messages, by the chat template, up to where the
        assistant speaks. Raises ``ValueError`` with a sentence."""
        if self._template is None:
            raise ValueError(
                "the target's tokenizer has no chat template; ask for a plain completion (run "
                "--no-chat, without --system), or give a template (serve --chat-template FILE)"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                json.loads(chat),
                chat_template=self._template,
                add_generation_prompt=True,
                tokenize=False,
            )
        except Exception as error:  # a template is a program of somebody else's
            why = first_line(error)
            raise ValueError(f"the chat template refuses these messages: {why}") from error
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def spell(self, token: int) -> bytes:
        """The bytes a token means, also where they are no whole character; of a special token its
        name."""
        known = self._spelled.get(token)
        if known is None:
            known = self._spelled[token] = self._spell(token)
        return known

    def _spell(self, token: int) -> bytes:
        name = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(name, str):  # an embedding beyond the tokenizer's own tokens
            return b""
        if token in self._tokenizer.added_tokens_decoder:
            return name.encode()
        if self._byte_level and all(c in _BYTES for c in name):
            return bytes(_BYTES[c] for c in name)
        if _BYTE.fullmatch(name):
            return bytes((int(name[3:5], 16),))
        return name.replace("\u2581", " ").encode()

    @property
    def _byte_level(self) -> bool:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return backend is not None and "ByteLevel" in str(backend.decoder)

    def decode(self, ids: Sequence[int]) -> str:
        """See ``Codec``."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    def is_left_out(self, token: int) -> bool:
        """See ``Codec``."""
        known = self._left_out.get(token)
        if known is None:
            known = self._left_out[token] = token in self._special and not self.decode((token,))
        return known

    def is_loose(self, token: int) -> bool:
        """See ``Codec``."""
        known = self._loose.get(token)
        if known is None:
            name = self._tokenizer.convert_ids_to_tokens(token)
            known = self._loose[token] = isinstance(name, str) and _BYTE.fullmatch(name) is not None
        return known


def load_tokenizer(directory: Path, template: str | None = None) -> HFTokenizer:
    """Read a checkpoint's tokenizer. ``template``: a chat template in place of its own. Raises
    ``CheckpointError``."""
    import transformers

    transformers.logging.set_verbosity_error()
    try:
        return HFTokenizer(transformers.AutoTokenizer.from_pretrained(str(directory)), template)
    except Exception as error:  # tokenizers raises bare Exception for files it cannot read
        why = first_line(error)
        raise CheckpointError(f"the tokenizer of {directory} cannot be read: {why}") from error
