"""Small GGUF files that are little more than a vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf", reason='needs gguf and the extra "llama": make setup-llama')
pytest.importorskip("llama_cpp.llama_cpp", reason='needs the extra "llama": make setup-llama')

import gguf
from gguf import TokenType

from asyncspec.plugins.hf.checkpoint.tokenizer import BYTE_OF_LETTER
from asyncspec.plugins.llama.target import OpenTarget, open_target

__all__ = ["TokenType"]

LETTER_OF_BYTE = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}

Tokens = Sequence[tuple[str, TokenType]]
"""Texts, as the file has them, and types."""


def letters(text: str) -> str:
    """A text as byte-level vocabularies write it."""
    return "".join(LETTER_OF_BYTE[byte] for byte in text.encode())


def normal(*texts: str) -> list[tuple[str, TokenType]]:
    return [(text, TokenType.NORMAL) for text in texts]


def control(*texts: str) -> list[tuple[str, TokenType]]:
    return [(text, TokenType.CONTROL) for text in texts]


BYTES = normal(*(LETTER_OF_BYTE[byte] for byte in range(256)))
"""Of byte-level vocabularies: every byte."""

SENTENCEPIECE = [
    ("<unk>", TokenType.UNKNOWN),
    *control("<s>", "</s>"),
    *((f"<0x{byte:02X}>", TokenType.BYTE) for byte in range(256)),
    ("<unused0>", TokenType.UNUSED),
    ("<|own|>", TokenType.USER_DEFINED),
    *normal("▁", "▁▁", "a", "bc", "▁d", "▁,", "é", "世", "🙂", "\N{REPLACEMENT CHARACTER}"),
]
"""Of Llama 2's kind."""


def save_vocabulary(
    path: Path,
    tokens: Tokens,
    *,
    pre: str | None = "llama-bpe",
    keys: Mapping[str, Any] | None = None,
    arch: str = "llama",
) -> OpenTarget:
    """``pre``: how a byte-level vocabulary splits texts; None: a SentencePiece one. ``keys``: of
    ``tokenizer.ggml``."""
    file = gguf.GGUFWriter(path, arch)
    file.add_block_count(1)
    file.add_context_length(64)
    file.add_embedding_length(1)
    file.add_tokenizer_model("llama" if pre is None else "gpt2")
    if pre is None:
        file.add_token_scores([0.0] * len(tokens))
    else:
        file.add_tokenizer_pre(pre)
        file.add_token_merges(["a b"])
    file.add_token_list([text for text, _ in tokens])
    file.add_token_types([kind for _, kind in tokens])
    for key, value in (keys or {}).items():
        add = file.add_bool if isinstance(value, bool) else file.add_uint32
        add(f"tokenizer.ggml.{key}", value)
    file.add_tensor("token_embd.weight", np.zeros((len(tokens), 1), np.float32))
    file.add_tensor("blk.0.attn_norm.weight", np.zeros(1, np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return open_target(path)
