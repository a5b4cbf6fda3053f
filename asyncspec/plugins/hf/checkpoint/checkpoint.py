"""An opened checkpoint: its configuration, the list of its tensors, and the reading of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from asyncspec.backend.base import ModelInfo
from asyncspec.core.errors import CheckpointError, UserError
from asyncspec.plugins.hf.checkpoint.expert_stacks import unstack_experts
from asyncspec.plugins.hf.checkpoint.files.headers import (
    EMBEDDING,
    HEAD,
    CheckpointFiles,
    TensorInfo,
    main_dtype,
)
from asyncspec.plugins.hf.checkpoint.files.hub import open_files
from asyncspec.plugins.hf.checkpoint.files.stored import TORCH_DTYPES, read_stored, read_stored_rows
from asyncspec.plugins.hf.checkpoint.formats.dense import quantized_rows
from asyncspec.plugins.hf.checkpoint.formats.layouts import quantized_tensors
from asyncspec.plugins.hf.checkpoint.formats.settings import SETTINGS
from asyncspec.plugins.hf.checkpoint.formats.tensors import QuantizedTensor
from asyncspec.plugins.hf.checkpoint.model_config import (
    EXPERTS,
    SPARSE,
    architecture,
    inspect_checkpoint,
    read_config,
    text_config,
)
from asyncspec.plugins.hf.checkpoint.tensor_names import inner_name, usual_prefixes

_CONVERTED = 16 << 20
"""Bytes converted at a time."""
_LOOKED_UP = 8
"""Times as many bytes that the conversion of a quantised matrix needs."""

TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""How names of the language model's tensors begin in multimodal checkpoints."""

_MODEL_TYPES = {"kimi_k2": "deepseek_v3"}
"""Names that publishers give to a model type of transformers."""

LAYERS = "model.layers."
"""How the names of layers' tensors begin."""


class Checkpoint(Struct, frozen=True):
    """An ``OpenModel``. Weights of a model on the Hub are fetched when they are first read."""

    files: CheckpointFiles
    # ``dtype`` is the type that most bytes of the weights have.
    info: ModelInfo
    # transformers' configuration object.
    config: Any
    # By name; every expert has its own, and a quantised matrix is one.
    tensors: Mapping[str, TensorInfo]
    # The same, as the files have them.
    stored: Mapping[str, TensorInfo]
    fingerprint: str

    @property
    def path(self) -> Path:
        """Its directory."""
        return self.files.directory

    def computed_dtype(self, dtype: str) -> str:
        return str(resolve_dtype(self.info, dtype)).removeprefix("torch.")

    def fetch(self, tensors: Iterable[TensorInfo]) -> None:
        """Make the files of some of its tensors available. Raises as ``CheckpointFiles.fetch``."""
        self.files.fetch({part.file for info in tensors for part in info.stored})


def open_checkpoint(name: str | Path, *, tokenizer: bool = True) -> Checkpoint:
    """Open a directory or a Hub id (``tokenizer``: fetch its tokenizer, too). Raises
    ``CheckpointError`` with what to change, ``ClusterError`` where the Hub cannot be reached."""
    files = open_files(name, tokenizer=tokenizer)
    path = files.directory
    model_info = inspect_checkpoint(path)
    stored, tensors = model_tensors(files)
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        config = read_text_part(path)
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
    if model_info.architecture in SPARSE:
        logging.getLogger(__name__).warning(
            "%s attends to %d tokens that an indexer chooses; the context is no longer than that",
            *(path, model_info.context_length),
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
        stored=stored,
        fingerprint=files.fingerprint(read_config(path), stored),
    )


def model_tensors(files: CheckpointFiles) -> tuple[dict[str, TensorInfo], dict[str, TensorInfo]]:
    """The tensors of a model's files by name, each expert's by itself: as they are stored, and
    with those of a quantised matrix put together. Raises ``CheckpointError``."""
    settings = read_config(files.directory)
    stored = files.tensors()
    tensors = quantized_tensors(text_config(settings), stored)
    name = architecture(text_config(settings))
    prefixes = {**(TEXT_PREFIXES if name != architecture(settings) else {}), **usual_prefixes(name)}
    if prefixes:
        stored, tensors = renamed(stored, prefixes), renamed(tensors, prefixes)
    stored, tensors = (
        {inner_name(name, n): x for n, x in each.items()} for each in (stored, tensors)
    )
    if name in EXPERTS:
        stored, tensors = unstack_experts(stored), unstack_experts(tensors)
    return stored, tensors


def read_text_part(directory: Path) -> Any:
    """``text_part`` of a checkpoint's configuration, as transformers reads it. Raises as that."""
    from transformers import CONFIG_MAPPING, AutoConfig

    settings = read_config(directory)
    if (kind := _MODEL_TYPES.get(str(settings.get("model_type")))) is None:
        return text_part(AutoConfig.from_pretrained(directory))
    return text_part(CONFIG_MAPPING[kind].from_dict(settings | {"model_type": kind}))


def text_part(config: Any) -> Any:
    """The language model's configuration in a multimodal model's; any other as it is. transformers
    must not look for what quantised the weights: they are read without it."""
    text = config.get_text_config()
    for part in (config, text):
        for name in filter(partial(hasattr, part), SETTINGS):
            delattr(part, name)
    if text is not config:
        text.tie_word_embeddings = config.tie_word_embeddings
    return text


def renamed(
    tensors: Mapping[str, TensorInfo], prefixes: Mapping[str, str]
) -> dict[str, TensorInfo]:
    """Tensors by other names: the first of ``prefixes`` that a name begins with is replaced."""
    named: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        prefix = next(filter(name.startswith, prefixes), "")
        named[prefixes.get(prefix, "") + name.removeprefix(prefix)] = info
    return named


def _check_names(path: Path, tensors: Mapping[str, TensorInfo]) -> None:
    """Raises ``CheckpointError`` where no layer is named as all supported families name them."""
    if any(name.startswith(LAYERS) for name in tensors):
        return
    if any(name.startswith(LAYERS.removeprefix("model.")) for name in tensors):
        raise CheckpointError(
            f"{path} names its tensors without 'model.', as AutoModel saves a model without its "
            "head; save it with AutoModelForCausalLM"
        )
    example = f"it has {min(tensors)!r}" if tensors else "it has none at all"
    raise CheckpointError(
        f"{path} has no tensors named {LAYERS}* ({example}); give a checkpoint as transformers "
        "saves it"
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
    if name in ("fp16", "float16"):
        return torch.float16
    if name not in ("auto", "fp32", "float32"):
        raise UserError(f"unknown dtype {name!r}; use auto, float32, bfloat16 or float16")
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
    if not isinstance(info, QuantizedTensor) and (
        stored_type(info) == dtype or info.size <= _CONVERTED or info.transposed
    ):
        return _read(info).to(dtype)
    tensor = torch.empty(info.shape, dtype=dtype)
    for first, end in row_spans(info):
        tensor[first:end] = read_rows(info, first, end)
    return tensor


def row_spans(info: TensorInfo) -> list[tuple[int, int]]:
    """[first, end) of rows of a tensor, which make about ``_CONVERTED`` bytes each; less where
    codes are looked up in between."""
    rows = info.shape[0]
    size = _CONVERTED // _LOOKED_UP if isinstance(info, QuantizedTensor) else _CONVERTED
    step = max(1, size * rows // info.size)
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def read_rows(info: TensorInfo, first: int, end: int) -> Tensor:
    """Rows [first, end) of a tensor's first dimension, in the type they are stored in; float32 of a
    quantised one."""
    if isinstance(info, QuantizedTensor):
        return quantized_rows(info, first, end)
    if info.transposed:
        return _read(info)[first:end].contiguous()
    return read_stored_rows(info, first, end)


def _read(info: TensorInfo) -> Tensor:
    if info.transposed:
        stored = replace(info, shape=info.shape[::-1], transposed=False)
        return _read(stored).t().contiguous()
    return read_stored(info)


def stored_type(info: TensorInfo) -> torch.dtype:
    """The type a tensor of weights is stored in, or stands for. Raises ``CheckpointError`` where
    that is none of weights."""
    stored = TORCH_DTYPES.get(info.dtype)
    if stored is None:
        raise CheckpointError(
            f"{info.file} holds {info.dtype} weights, which its config.json does not explain; use "
            "an unquantised one"
        )
    return stored
