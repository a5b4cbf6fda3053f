"""Tokenizers of the kinds that matter to text that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from asyncspec_nodes.serving.text import UNFINISHED


class Raw:
    """A ``Tokenizer`` on the tokenizers library alone."""

    decodes_as_whole = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def is_special(self, token: int) -> bool:
        return self.tokenizer.id_to_token(token) in ("<s>", "<|end|>")

    def is_byte(self, token: int) -> bool:
        name = self.tokenizer.id_to_token(token) or ""
        return re.fullmatch(r"<0x[0-9A-F]{2}>", name) is not None

    def close(self) -> None:
        pass


def byte_level() -> Raw:
    """GPT-2's kind: every byte is a letter."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [a + b for a in letters[60:90] for b in ("ł", "a", "Ġ")]
    names = dict.fromkeys([*letters, *pairs])
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return Raw(tokenizer)


def fallback(*, strip: bool) -> Raw:
    """Llama 2's kind (``strip``), and Gemma's: words with a mark for the space, and raw bytes."""
    names = ["<unk>", "<s>", "▁", "▁▁", "a", "bc", "▁d", "▁ef", "é", "世", "🙂", UNFINISHED]
    names += [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    parts: list[decoders.Decoder] = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if strip:
        parts.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return Raw(tokenizer)


class Pieces:
    """A vocabulary of bytes, also of parts of characters: token i is the i-th piece."""

    decodes_as_whole = False
    template = ""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")

    def is_special(self, token: int) -> bool:
        return False

    def is_byte(self, token: int) -> bool:
        return False

    def close(self) -> None:
        pass


CODECS = {
    "byte level": byte_level(),
    "byte fallback, strip": fallback(strip=True),
    "byte fallback": fallback(strip=False),
}
