"""The target's own tokenizer, as Hugging Face loads it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncspec.errors import CheckpointError

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """Text to tokens and back. A ``Codec`` for ``text.Detokenizer``."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._special = {*tokenizer.all_special_ids, *(i for i, t in added.items() if t.special)}
        self._loose: dict[int, bool] = {}

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

    def decode(self, ids: Sequence[int]) -> str:
        """See ``Codec``."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    def is_loose(self, token: int) -> bool:
        """See ``Codec``."""
        known = self._loose.get(token)
        if known is None:
            name = self._tokenizer.convert_ids_to_tokens(token)
            byte = isinstance(name, str) and _BYTE.fullmatch(name) is not None
            known = self._loose[token] = byte or token in self._special
        return known


def load_tokenizer(directory: Path) -> Tokenizer:
    """Read a checkpoint's tokenizer. Raises ``CheckpointError``."""
    import transformers

    transformers.logging.set_verbosity_error()
    try:
        return Tokenizer(transformers.AutoTokenizer.from_pretrained(str(directory)))
    except Exception as error:  # tokenizers raises bare Exception for files it cannot read
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"the tokenizer of {directory} cannot be read: {why}") from error
