"""A GGUF model opened: what its metadata says of it, and whether two nodes have the same one."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from pathlib import Path
from typing import Any

from msgspec import Struct

from asyncspec.backend.base import SAMPLE_BYTES, DType, ModelInfo, SharedMatrix
from asyncspec.backend.llama.cut import EMBEDDING, HEAD, layer_count, matrix
from asyncspec.backend.llama.gguf_file import GGUF, Tensor, open_gguf
from asyncspec.core.errors import CheckpointError, UserError
from asyncspec_protocol.links import GGUF_PREFIX

DTYPE = "float32"
"""Of hidden states between stages, whatever the weights are."""

TOKENS = "tokenizer.ggml.tokens"

_ENDS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|return|>",
        "<｜end▁of▁sentence｜>",  # noqa: RUF001
    }
)
"""Control tokens that end an answer where the file does not say so, as in llama.cpp."""

_CONTROL = 3
"""The type of tokens that are no text."""

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


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
        from asyncspec.backend.llama.dequantize import dequantized

        tied = name == "embedding" or HEAD not in self.model.tensors
        return dequantized(matrix(self.model, EMBEDDING if tied else HEAD))


def open_target(path: Path) -> OpenTarget:
    """Read the headers of a model's files. Raises ``CheckpointError``."""
    opened = OpenTarget(path, open_gguf(path))
    opened.model.need("general.architecture")
    return opened


def end_tokens(model: GGUF) -> tuple[int, ...]:
    """Tokens that end an answer."""
    keys = [f"tokenizer.ggml.{key}" for key in _END_KEYS]
    stated = {model.number(key) for key in keys if key in model.metadata}
    kinds = model.get("tokenizer.ggml.token_type") or []
    named = {
        i
        for i, (token, kind) in enumerate(zip(model.get(TOKENS) or [], kinds, strict=False))
        if kind == _CONTROL and token in _ENDS
    }
    return tuple(sorted(stated | named))


def check_vocab(target: OpenTarget, draft: OpenTarget) -> None:
    """Raise ``CheckpointError`` where the draft's tokens are not the target's."""
    ours, theirs = (model.model.get(TOKENS) for model in (target, draft))
    if ours == theirs:
        return
    ours, theirs = ours or [], theirs or []
    least = min(len(ours), len(theirs))
    different = [i for i in range(least) if ours[i] != theirs[i]]
    if different or not least:
        first = f", the first being {ours[different[0]]!r}" if different else ""
        raise CheckpointError(
            f"tokenizer mismatch: {draft.path} and {target.path} disagree on {len(different)} "
            f"entries of their vocabularies{first}; use a draft model of the same family"
        )


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
