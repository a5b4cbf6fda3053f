"""A GGUF model opened: what its metadata says of it, and whether two nodes have the same one."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from pathlib import Path
from typing import Any

from msgspec import Struct

from asyncspec.backend.base import SAMPLE_BYTES, DType, ModelInfo, SharedMatrix
from asyncspec.core.errors import CheckpointError, UserError
from asyncspec.plugins.llama.cut import EMBEDDING, HEAD, layer_count, matrix
from asyncspec.plugins.llama.gguf_file import GGUF, Tensor, open_gguf
from asyncspec.plugins.llama.layer_kinds import has_states
from asyncspec_protocol.links import GGUF_PREFIX

DTYPE = "float32"
"""Type of hidden states between stages, whatever the weights are."""

TOKENS = "tokenizer.ggml.tokens"

_ENDS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<｜end▁of▁sentence｜>",  # noqa: RUF001
        "[e~[",
    }
)
"""Tokens that end an answer by their text alone, as in llama.cpp (``llama-vocab.cpp``)."""

_CODE_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""One token more of each of these kinds ends an answer: what the file states, else the first of
these."""

_CONTROL = 3
"""The type of tokens that are no text."""

_NO_DECODERS = frozenset(
    {
        "bert",
        "eurobert",
        "gemma-embedding",
        "jina-bert-v2",
        "jina-bert-v3",
        "modern-bert",
        "neo-bert",
        "nomic-bert",
        "nomic-bert-moe",
        "t5",
        "t5encoder",
        "wavtokenizer-dec",
    }
)
"""Families that llama.cpp computes without a cache, or with an encoder."""


class OpenTarget(Struct, frozen=True):
    path: Path
    model: GGUF

    @property
    def info(self) -> ModelInfo:
        model = self.model
        return ModelInfo(
            model.architecture,
            layer_count(model),
            model.number("{arch}.embedding_length"),
            matrix(model, EMBEDDING).shape[1],
            model.number("{arch}.context_length"),
            end_tokens(model),
            DTYPE,
            shares_prefixes=not has_states(model),
            keeps_states=has_states(model),
        )

    @property
    def fingerprint(self) -> str:
        """See ``OpenModel``: of the metadata, the tensors' names, types and shapes, and samples of
        their bytes. Which file a tensor is in does not matter."""
        digest = hashlib.sha256()
        for key, value in sorted(self.model.metadata.items()):
            if not key.startswith("split."):
                digest.update(key.encode() + value.raw)
        opened: dict[Path, int] = {}
        try:
            for name, tensor in sorted(self.model.tensors.items()):
                digest.update(f"\n{name} {tensor.type} {tensor.shape} ".encode())
                digest.update(_sample(opened, tensor))
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read ({error})") from error
        finally:
            for descriptor in opened.values():
                os.close(descriptor)
        return GGUF_PREFIX + digest.hexdigest()

    @property
    def weights(self) -> str:
        """The type that most of the weights have."""
        sizes: Counter[str] = Counter()
        for tensor in self.model.tensors.values():
            sizes[tensor.type] += tensor.size
        return sizes.most_common(1)[0][0]

    def computed_dtype(self, dtype: DType) -> str:
        if dtype not in ("auto", DTYPE, "fp32"):
            raise UserError(f"llama.cpp's stages exchange float32; leave dtype {dtype} out")
        return DTYPE

    def shared_matrix(self, name: SharedMatrix) -> Any:
        from asyncspec.plugins.llama.dequantize import dequantized

        tied = name == "embedding" or HEAD not in self.model.tensors
        return dequantized(matrix(self.model, EMBEDDING if tied else HEAD))


def open_target(path: Path) -> OpenTarget:
    """Read the headers of a model's files. Raises ``CheckpointError``."""
    opened = OpenTarget(path, open_gguf(path))
    opened.model.need("general.architecture")
    family = opened.model.architecture
    if family in _NO_DECODERS or opened.model.get("{arch}.attention.causal") is False:
        raise CheckpointError(f"{path}: a {family} model does not continue text; use another model")
    return opened


def end_tokens(model: GGUF) -> tuple[int, ...]:
    """Tokens that end an answer, as llama.cpp finds them; nodes need not have it installed."""
    texts = vocabulary(model)
    named = _ENDS.union(*_CODE_ENDS.values())
    ids = {text: i for i, text in enumerate(texts) if text in named}
    ends = {ids[text] for text in _ENDS & ids.keys()}
    ends |= {token for kind in ("eos", "eot", "eom") for token in _stated(model, kind, texts)}
    for kind, names in _CODE_ENDS.items():
        others = sorted(ids[text] for text in names if text in ids)
        ends |= {*(_stated(model, kind, texts) or others[:1])}
    said = {texts[token] for token in ends} if texts else set()
    # Here it stands between the messages of an answer (gpt-oss, Solar).
    if said & {"<|call|>", "<|calls|>"} and said & {"<|return|>", "<|flush|>"}:
        ends -= {ids.get("<|end|>")}
    # Here it is text (Gemma 4, PLaMo).
    if said & {"<|tool_response>", "<|plamo:eos|>"}:
        ends -= {ids.get("</s>")}
    return tuple(sorted(ends))


def _stated(model: GGUF, kind: str, texts: list[str]) -> list[int]:
    """The token of a kind that the file states, if its vocabulary has it."""
    key = f"tokenizer.ggml.{kind}_token_id"
    tokens = [model.number(key)] if key in model.metadata else []
    return [token for token in tokens if not texts or token < len(texts)]


def vocabulary(model: GGUF) -> list[str]:
    """Texts of all tokens; of none where the file has no vocabulary. Raises ``CheckpointError``."""
    texts = model.get(TOKENS, [])
    if not isinstance(texts, list) or (texts and not isinstance(texts[0], str)):
        raise CheckpointError(f"{model.files[0]}: {TOKENS} cannot be {texts!r:.40}; fetch it again")
    return texts


def control_tokens(model: GGUF) -> frozenset[int]:
    """Tokens that are no text by the file. llama.cpp itself shows some of them (gpt-oss)."""
    kinds = model.get("tokenizer.ggml.token_type") or []
    return frozenset(i for i, kind in enumerate(kinds) if kind == _CONTROL)


def _sample(opened: dict[Path, int], tensor: Tensor) -> bytes:
    assert tensor.file is not None
    if tensor.file not in opened:
        opened[tensor.file] = os.open(tensor.file, os.O_RDONLY)
    last = max(0, tensor.size - SAMPLE_BYTES)
    length = min(tensor.size, SAMPLE_BYTES)
    read = (
        os.pread(opened[tensor.file], length, tensor.offset + at) for at in (0, last // 2, last)
    )
    return b"".join(read)
