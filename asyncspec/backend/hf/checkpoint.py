"""An opened checkpoint: its configuration, the list of its tensors, and the reading of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from asyncspec.backend.base import ModelInfo
from asyncspec.backend.hf.checkpoint_files import (
    EMBEDDING,
    HEAD,
    CheckpointFiles,
    TensorInfo,
    main_dtype,
)
from asyncspec.backend.hf.experts import unstack_experts
from asyncspec.backend.hf.hub import open_files
from asyncspec.backend.hf.model_config import (
    EXPERTS,
    TEXT_PARTS,
    architecture,
    inspect_checkpoint,
    read_config,
)
from asyncspec.core.errors import CheckpointError, UserError

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_CONVERTED = 16 << 20
"""Bytes converted at a time."""

TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""How names of the language model's tensors begin in multimodal checkpoints."""

LAYERS = "model.layers."
"""How the names of layers' tensors begin."""


class Checkpoint(Struct, frozen=True):
    """An ``OpenModel``. Weights of a model on the Hub are fetched when they are first read."""

    files: CheckpointFiles
    # ``dtype`` is the type that most bytes of the weights have.
    info: ModelInfo
    # transformers' configuration object.
    config: Any
    # By name; every expert has its own.
    tensors: Mapping[str, TensorInfo]
    fingerprint: str

    @property
    def path(self) -> Path:
        """Its directory."""
        return self.files.directory

    def computed_dtype(self, dtype: str) -> str:
        return str(resolve_dtype(self.info, dtype)).removeprefix("torch.")

    def fetch(self, tensors: Iterable[TensorInfo]) -> None:
        """Make the files of some of its tensors available. Raises as ``CheckpointFiles.fetch``."""
        self.files.fetch({info.file for info in tensors})


def open_checkpoint(name: str | Path, *, tokenizer: bool = True) -> Checkpoint:
    """Open a directory or a Hub id (``tokenizer``: fetch its tokenizer, too). Raises
    ``CheckpointError`` with what to change, ``ClusterError`` where the Hub cannot be reached."""
    files = open_files(name, tokenizer=tokenizer)
    path = files.directory
    model_info = inspect_checkpoint(path)
    tensors = files.tensors()
    if architecture(read_config(path)) in TEXT_PARTS:
        tensors = text_tensors(tensors)
    if model_info.architecture in EXPERTS:
        tensors = unstack_experts(tensors)
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        config = text_part(AutoConfig.from_pretrained(str(path)))
    except Exception as error:  # invalid settings may fail in any way
        raise CheckpointError(
            f"config.json of {path} is not understood: {in_line(error)}"
        ) from error
    # transformers runs the class that the model_type names.
    meant = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, "model without a head")
    if meant != model_info.architecture:
        raise CheckpointError(
            f"config.json of {path} has the model_type {config.model_type!r}, which is a {meant}, "
            f"not the {model_info.architecture} it names; correct one of the two"
        )
    _check_names(path, tensors)
    if config.tie_word_embeddings and HEAD in tensors:
        # Some programs store a tied matrix once, under the head's name.
        tensors.setdefault(EMBEDDING, tensors[HEAD])
    return Checkpoint(
        files=files,
        info=replace(model_info, dtype=main_dtype(tensors)),
        config=config,
        tensors=tensors,
        fingerprint=files.fingerprint(read_config(path), tensors),
    )


def text_part(config: Any) -> Any:
    """Of a multimodal model's configuration the language model's; any other as it is."""
    text = config.get_text_config()
    if text is not config:
        text.tie_word_embeddings = config.tie_word_embeddings
    return text


def text_tensors(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Tensors by the names that they have in a model of text alone."""
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        prefix = next(filter(name.startswith, TEXT_PREFIXES), "")
        found[TEXT_PREFIXES.get(prefix, "") + name.removeprefix(prefix)] = info
    return found


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


def in_line(error: Exception) -> str:
    """The whole message of one of transformers' errors without line breaks, or the error's type."""
    return " ".join(str(error).split()) or type(error).__name__


def resolve_dtype(info: ModelInfo, name: str = "auto") -> torch.dtype:
    """The type to compute in. "auto": bfloat16 for a bfloat16 checkpoint, else float32, which holds
    all values of float16; the matrices of layers may stay float16 (``dense.py``). Raises
    ``UserError`` for an unknown one."""
    kind = info.dtype if name == "auto" else name
    if kind in ("bf16", "bfloat16"):
        return torch.bfloat16
    if name not in ("auto", "fp32", "float32"):
        raise UserError(f"unknown dtype {name!r}; use auto, float32 or bfloat16")
    return torch.float32


def head_is_embedding(checkpoint: Checkpoint, dtype: torch.dtype) -> bool:
    """Whether a model in ``dtype`` has one matrix as embedding and head. As in transformers, a
    stored head that differs takes precedence over the configuration."""
    tied = bool(checkpoint.config.tie_word_embeddings)
    embedding, head = checkpoint.tensors.get(EMBEDDING), checkpoint.tensors.get(HEAD)
    if not tied or embedding is None or head is None:
        return tied
    if embedding == head or embedding.shape != head.shape:
        return embedding == head
    checkpoint.fetch((embedding, head))
    return all(
        torch.equal(*(read_rows(info, *span).to(dtype) for info in (embedding, head)))
        for span in row_spans(head)
    )


def read_tensor(info: TensorInfo, dtype: torch.dtype) -> Tensor:
    """Read one tensor in memory of its own, converted by ``_CONVERTED`` bytes without a copy."""
    if stored_type(info) == dtype or info.size <= _CONVERTED or info.transposed:
        return _read(info).to(dtype)
    tensor = torch.empty(info.shape, dtype=dtype)
    for first, end in row_spans(info):
        tensor[first:end] = read_rows(info, first, end)
    return tensor


def row_spans(info: TensorInfo) -> list[tuple[int, int]]:
    """[first, end) of rows of a tensor, which make about ``_CONVERTED`` bytes each."""
    rows = info.shape[0]
    step = max(1, _CONVERTED * rows // info.size)
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def read_rows(info: TensorInfo, first: int, end: int) -> Tensor:
    """Rows [first, end) of a tensor's first dimension, in the type they are stored in."""
    if info.transposed:
        return _read(info)[first:end].contiguous()
    row = info.size // info.shape[0]
    shape = (end - first, *info.shape[1:])
    offset, size = info.offset + first * row, (end - first) * row
    return _read(replace(info, offset=offset, size=size, shape=shape))


def _read(info: TensorInfo) -> Tensor:
    if info.transposed:
        stored = replace(info, shape=info.shape[::-1], transposed=False)
        return _read(stored).t().contiguous()
    tensor = torch.empty(info.shape, dtype=stored_type(info))
    try:
        with info.file.open("rb") as stream:
            stream.seek(info.offset)
            count = stream.readinto(tensor.reshape(-1).view(torch.uint8).numpy().data)
    except OSError as error:
        raise CheckpointError(f"{info.file} cannot be read ({error})") from error
    if count < info.size:
        raise CheckpointError(f"{info.file} is shorter than its header says")
    return tensor


def stored_type(info: TensorInfo) -> torch.dtype:
    """The type a tensor is stored in. Raises ``CheckpointError`` for one of quantised weights."""
    stored = TORCH_DTYPES.get(info.dtype)
    if stored is None:
        raise CheckpointError(f"{info.file} holds {info.dtype} weights; use an unquantised one")
    return stored
