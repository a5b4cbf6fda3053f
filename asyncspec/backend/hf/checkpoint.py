"""A checkpoint, opened: its configuration and the list of its tensors, nothing loaded yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace

from asyncspec.backend.base import ModelInfo
from asyncspec.backend.hf.checkpoint_files import EMBEDDING, HEAD, TensorInfo, main_dtype, read_into
from asyncspec.backend.hf.experts import unstack_experts
from asyncspec.backend.hf.families import inspect_checkpoint, read_config
from asyncspec.backend.hf.repository import CheckpointFiles, open_files
from asyncspec.core.errors import CheckpointError, UserError

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_NAMES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}
_PIECE = 16 << 20
"""Bytes converted at a time."""

LAYERS = "model.layers."
"""How the tensors of layers are named."""


class Checkpoint(Struct, frozen=True):
    """A directory whose files were looked through and fit together. Weights of a model on the Hub
    are fetched when they are first read."""

    # Where its weights come from.
    files: CheckpointFiles
    info: ModelInfo
    # transformers' configuration object.
    config: Any
    # By name; every expert has its own.
    tensors: Mapping[str, TensorInfo]
    # The same model or not: see ``CheckpointFiles``.
    fingerprint: str

    @property
    def path(self) -> Path:
        """Its directory."""
        return self.files.directory

    def computed_dtype(self, dtype: str) -> str:
        """See ``OpenModel``."""
        return str(resolve_dtype(self, dtype)).removeprefix("torch.")

    def fetch(self, tensors: Iterable[TensorInfo]) -> None:
        """Have the files in place that some of its tensors are in. Raises as ``download``."""
        self.files.fetch({info.file for info in tensors})


def open_checkpoint(name: str | Path, *, tokenizer: bool = True) -> Checkpoint:
    """Look through a checkpoint: a directory, or a Hub id (``tokenizer``: whose tokenizer is
    needed, too). Raises ``CheckpointError`` with what to change, ``ClusterError`` where the Hub
    cannot be reached."""
    files = open_files(name, tokenizer=tokenizer)
    path = files.directory
    model_info = inspect_checkpoint(path)
    tensors = unstack_experts(files.tensors())
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(path))
    except Exception as error:  # a setting that makes no sense may fail in any way
        why = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"config.json of {path} is not understood: {why}") from error
    meant = _causal_model(config.model_type)
    if meant != model_info.architecture:
        raise CheckpointError(
            f"config.json of {path} has the model_type {config.model_type!r}, which is a {meant}, "
            f"not the {model_info.architecture} it names; correct one of the two"
        )
    _check_names(path, tensors)
    if config.tie_word_embeddings and HEAD in tensors:
        # Of matrices that are one, some programs store only the first by its name.
        tensors.setdefault(EMBEDDING, tensors[HEAD])
    return Checkpoint(
        files=files,
        info=model_info,
        config=config,
        tensors=tensors,
        fingerprint=files.fingerprint(read_config(path), tensors),
    )


def _check_names(path: Path, tensors: Mapping[str, TensorInfo]) -> None:
    """Raises ``CheckpointError`` where no layer is named as all supported families name them."""
    if any(name.startswith(LAYERS) for name in tensors):
        return
    if any(name.startswith(LAYERS.removeprefix("model.")) for name in tensors):
        raise CheckpointError(
            f"{path} names its tensors without 'model.', as AutoModel saves a model without its "
            "head; save it with AutoModelForCausalLM"
        )
    example = min(tensors, default="")
    raise CheckpointError(
        f"{path} has no tensors named {LAYERS}* (one of its own is {example!r}); give a checkpoint "
        "as transformers saves it"
    )


def _causal_model(model_type: str) -> str:
    """The class transformers itself makes of a configuration, by whose settings it runs."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, "model without a head"))


def resolve_dtype(checkpoint: Checkpoint, name: str = "auto") -> torch.dtype:
    """The type to compute in. "auto": bfloat16 for a bfloat16 checkpoint, else float32.

    float16 becomes float32, which holds all its values; few CPUs compute in float16. The matrices
    of layers stay float16 in memory where torch can multiply them so (``dense.py``).
    """
    if name == "auto":
        stored = main_dtype(checkpoint.tensors)
        return torch.bfloat16 if stored == "bfloat16" else torch.float32
    return named_dtype(name)


def named_dtype(name: str) -> torch.dtype:
    """A type by its name. Raises ``UserError``."""
    if name not in _NAMES:
        raise UserError(f"unknown dtype {name!r}; use auto, float32 or bfloat16")
    return _NAMES[name]


def head_is_embedding(checkpoint: Checkpoint, dtype: torch.dtype) -> bool:
    """Whether a model in ``dtype`` has one matrix as embedding and head. As in transformers a head
    that is stored and is another one counts for more than the configuration."""
    embedding, head = checkpoint.tensors.get(EMBEDDING), checkpoint.tensors.get(HEAD)
    if not checkpoint.config.tie_word_embeddings or embedding is None or head is None:
        return bool(checkpoint.config.tie_word_embeddings)
    if embedding == head or embedding.shape != head.shape:
        return embedding == head
    checkpoint.fetch((embedding, head))
    rows = head.shape[0]
    step = max(1, _PIECE * rows // head.size)
    parts = ((first, min(first + step, rows)) for first in range(0, rows, step))
    return all(
        torch.equal(read_rows(embedding, *part).to(dtype), read_rows(head, *part).to(dtype))
        for part in parts
    )


def read_tensor(info: TensorInfo, dtype: torch.dtype) -> torch.Tensor:
    """Read one tensor in its own memory and convert it to ``dtype``, piece by piece, so that no
    second copy of a large one lies beside it."""
    stored = stored_type(info)
    if stored == dtype or info.size <= _PIECE:
        return _read(info, stored).to(dtype)
    tensor = torch.empty(info.shape, dtype=dtype)
    step = max(1, _PIECE * info.shape[0] // info.size)
    for first in range(0, info.shape[0], step):
        end = min(first + step, info.shape[0])
        tensor[first:end] = read_rows(info, first, end)
    return tensor


def read_rows(info: TensorInfo, first: int, end: int) -> torch.Tensor:
    """Rows [first, end) of a tensor's first dimension, in the type they are stored in."""
    row = info.size // info.shape[0]
    shape = (end - first, *info.shape[1:])
    part = replace(info, offset=info.offset + first * row, size=(end - first) * row, shape=shape)
    return _read(part, stored_type(info))


def _read(info: TensorInfo, stored: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(info.shape, dtype=stored)
    if info.size:
        raw = tensor.reshape(-1).view(torch.uint8)
        read_into(info, raw.numpy().data)
    return tensor


def stored_type(info: TensorInfo) -> torch.dtype:
    """The type a tensor is stored in. Raises ``CheckpointError`` for one of quantised weights."""
    stored = TORCH_DTYPES.get(info.dtype)
    if stored is None:
        raise CheckpointError(f"{info.file} holds {info.dtype} weights; use an unquantised one")
    return stored
