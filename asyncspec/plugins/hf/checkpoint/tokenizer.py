"""A model's own tokenizer, as Hugging Face loads it, and the names of its tokens."""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from asyncspec.backend.chat_templates import by_name, used
from asyncspec.backend.infill import INFILL_TOKENS, NO_INFILL
from asyncspec.backend.template_worker import TemplateWorker
from asyncspec.core.errors import CheckpointError, first_line

_FAST, _SENTENCEPIECE = "tokenizer.json", "tokenizer.model"
"""Files of a vocabulary: of the tokenizers package, and of older programs."""

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")

_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_OF_LETTER = {chr(b): b for b in _PRINTABLE} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}
"""The byte of each letter of byte-level vocabularies (GPT-2's table): printable Latin-1 characters
stand for themselves, the characters from 256 on for the other bytes, in order."""

_CLEANS_BPE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"

_REMEMBER = 1 << 14
"""Tokens looked up again and again; grammars look once at the whole vocabulary."""


class HFTokenizer:
    """A ``Tokenizer``. ``template``: a chat template (Jinja) in place of the tokenizer's own."""

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._templates = by_name(template or tokenizer.chat_template)
        self.has_template = bool(self._templates)
        tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        self._write = TemplateWorker(
            "asyncspec.plugins.hf.checkpoint.templates:make", self._templates, tokens
        )
        added = tokenizer.added_tokens_decoder
        self._special = {*tokenizer.all_special_ids, *(i for i, t in added.items() if t.special)}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._byte_level = backend is not None and "ByteLevel" in str(backend.decoder)
        # BPE vocabularies clean up the spaces before punctuation only where they are forced to.
        self.decodes_as_whole = bool(tokenizer.clean_up_tokenization_spaces) and (
            type(getattr(backend, "model", None)).__name__ != "BPE"
            or bool(getattr(tokenizer, _CLEANS_BPE, False))
        )
        # A detokenizer looks up the same few tokens again and again.
        remembered = lru_cache(_REMEMBER)
        self.spell = remembered(self._spell)
        self.is_special = remembered(self._is_special)
        self.is_byte = remembered(self._is_byte)
        # transformers finishes its setup with the first text, and not in two threads at a time.
        self.encode("a")

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of a prompt with the tokenizer's usual special tokens, no chat template."""
        return tuple(self._tokenizer(text)["input_ids"])

    def encode_bare(self, text: str) -> tuple[int, ...]:
        """See ``BareTokenizer``."""
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def infill(self, prefix: str, suffix: str) -> tuple[int, ...]:
        """See ``InfillTokenizer``. Raises ``ValueError``."""
        vocabulary = self._tokenizer.get_vocab()
        marks = next((m for m in INFILL_TOKENS if all(name in vocabulary for name in m)), None)
        if marks is None:
            raise ValueError(NO_INFILL)
        prefix_mark, suffix_mark, middle_mark = (vocabulary[name] for name in marks)
        start = self._tokenizer.bos_token_id
        begin = [token for token in self._tokenizer("")["input_ids"] if token == start]
        texts = (
            self._tokenizer(t, add_special_tokens=False)["input_ids"] for t in (prefix, suffix)
        )
        first, last = texts
        return (*begin, prefix_mark, *first, suffix_mark, *last, middle_mark)

    def render(self, chat: str) -> tuple[int, ...]:
        """See ``Tokenizer``: by the chat template."""
        return tuple(self._tokenizer(self.prompt(chat), add_special_tokens=False)["input_ids"])

    def prompt(self, chat: str) -> str:
        if not self._templates:
            raise ValueError(
                "the target's tokenizer has no chat template; ask for a plain completion (run "
                "--no-chat, without --system), or give a template (serve --chat-template FILE)"
            )
        return self._write(chat)

    @property
    def template(self) -> str:
        return used(self._templates)

    def close(self) -> None:
        self._write.close()

    def decode(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    def _spell(self, token: int) -> bytes:
        name = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(name, str):  # an embedding beyond the tokenizer's own tokens
            return b""
        if token in self._tokenizer.added_tokens_decoder:
            return name.encode()
        if self._byte_level and all(c in BYTE_OF_LETTER for c in name):
            return bytes(BYTE_OF_LETTER[c] for c in name)
        if _BYTE.fullmatch(name):
            return bytes((int(name[3:5], 16),))
        return name.replace("\u2581", " ").encode()

    def _is_special(self, token: int) -> bool:
        return token in self._special and not self.decode((token,))

    def _is_byte(self, token: int) -> bool:
        name = self._tokenizer.convert_ids_to_tokens(token)
        return isinstance(name, str) and _BYTE.fullmatch(name) is not None


def load_tokenizer(directory: Path, template: str | None = None) -> HFTokenizer:
    """``template``: a chat template in place of its own. Raises ``CheckpointError``."""
    with _readable(directory):
        return HFTokenizer(_tokenizer(directory), template)


def _tokenizer(directory: Path) -> Any:
    """As transformers has it."""
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers.AutoTokenizer.from_pretrained(str(directory))


@contextmanager
def _readable(directory: Path) -> Iterator[None]:
    """Raises ``CheckpointError`` for what fails inside."""
    try:
        yield
    except Exception as error:  # tokenizers raises bare Exception for files it cannot read
        why = first_line(error)
        if (directory / _SENTENCEPIECE).is_file() and not (directory / _FAST).is_file():
            why = f"without tokenizer.json it takes the package sentencepiece ({why})"
        raise CheckpointError(f"the tokenizer of {directory} cannot be read: {why}") from error


def token_ids(directory: Path) -> dict[str, int]:
    """Ids of all tokens, added ones too: of ``tokenizer.json``, or of older files as transformers
    reads them. Raises ``CheckpointError``."""
    file = directory / _FAST
    if not file.is_file():
        if not any((directory / name).is_file() for name in (_SENTENCEPIECE, "vocab.json")):
            raise CheckpointError(
                f"{directory} has no tokenizer.json; save its tokenizer in the fast format"
            )
        with _readable(directory):
            return dict(_tokenizer(directory).get_vocab())
    try:
        content = msgspec.json.decode(file.read_bytes().removeprefix(BOM_UTF8), type=dict[str, Any])
        vocab = content["model"]["vocab"]
        if isinstance(vocab, list):  # Unigram: (token, score) in order of id
            vocab = {entry[0]: i for i, entry in enumerate(vocab)}
        added = content.get("added_tokens") or ()
        return dict(vocab) | {token["content"]: token["id"] for token in added}
    except (OSError, msgspec.MsgspecError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"{file} is not a tokenizer this program can read") from error


def end_token(directory: Path) -> int | None:
    """The token that ends a text by the tokenizer's own settings, if they are here."""
    try:
        settings = msgspec.json.decode((directory / "tokenizer_config.json").read_bytes())
        name = settings["eos_token"]
        return token_ids(directory).get(name["content"] if isinstance(name, dict) else name)
    except (OSError, msgspec.MsgspecError, KeyError, TypeError, CheckpointError):
        return None
