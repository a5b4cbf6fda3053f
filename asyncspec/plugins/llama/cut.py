"""A block of layers as a GGUF file of its own, which is nowhere written.

llama.cpp loads whole models only, so a stage is given one: the target's metadata with fewer layers,
and of the tensors the stage's own, renumbered. It reads them where they are in the target's files;
what llama.cpp asks for and a stage does not use (a head before the last stage) is a hole in the
file, whose bytes are never read.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncspec.core.errors import CheckpointError
from asyncspec.plugins.llama.gguf_file import (
    GGUF,
    STRING,
    Tensor,
    Value,
    header,
    tensor_bytes,
    value,
)
from asyncspec.plugins.llama.layer_kinds import kv_heads, listed_layers, recurrent_layers

Span = tuple[int, int]

PATTERNS = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2, "olmo2": 4, "cohere2": 4}
"""In families with windows every n-th layer sees everything, unless the file says which."""

_PATTERN = "{arch}.attention.sliding_window_pattern"

FAMILIES = frozenset(
    {
        "llama",
        "mistral3",
        "qwen2",
        "qwen3",
        "qwen3moe",
        "gemma",
        "phi3",
        "granite",
        "olmoe",
        "deepseek2",
        "lfm2",
        "lfm2moe",
        "qwen3next",
        "qwen35",
        "qwen35moe",
        "nemotron_h",
        "nemotron_h_moe",
        "granitehybrid",
        "falcon-h1",
        *PATTERNS,
    }
)
"""Those that llama.cpp computes alike in parts and as a whole; what they derive from a layer's
number is said in the metadata of the part."""

BY_DEPTH: Mapping[str, frozenset[int]] = {
    "gemma2": frozenset({46}),
    "gemma3": frozenset({62}),
    "deepseek2": frozenset({26, 27, 47, 48}),
}
"""Numbers of layers by which llama.cpp takes a model for another variant of its family."""

SCALED_INPUT = frozenset({"gemma", "gemma2"})
"""Families that multiply whatever comes in by the root of its width, embeddings or not."""

_SECTIONS = ".rope.dimension_sections"
"""A list that every layer has whole."""

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
EMBEDDING, HEAD, _NORM = "token_embd.weight", "output.weight", "output_norm.weight"
_OF_THE_HEAD = (HEAD, _NORM, "output.bias", "output_norm.bias")
_LEFT_OUT = ("tokenizer.", "split.", "general.alignment")
DUMMY_VOCAB = 32


def cut(model: GGUF, first: int, last: int) -> tuple[dict[str, Value], dict[str, Tensor]]:
    """Metadata and tensors of layers [first, last). Raises ``CheckpointError`` where they cannot
    be computed by themselves."""
    for problem in refused(model, [(first, last)]).values():
        raise CheckpointError(problem)
    tensors = own_tensors(model, first, last)
    return _metadata(model, first, last, tensors[EMBEDDING].shape[1]), tensors


def own_tensors(model: GGUF, first: int, last: int) -> dict[str, Tensor]:
    """Tensors of layers [first, last), whether or not they can be computed by themselves."""
    has_embedding, has_head = first == 0, last == layer_count(model)
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.tensors.items():
        if (layer := _LAYER.fullmatch(name)) is None:
            if name != EMBEDDING and name not in _OF_THE_HEAD:
                tensors[name] = tensor
        elif first <= int(layer[1]) < last:
            tensors[f"blk.{int(layer[1]) - first}.{layer[2]}"] = tensor
    embedding = matrix(model, EMBEDDING)
    head = model.tensors.get(HEAD)
    width, vocab = embedding.shape[0], embedding.shape[1]
    if has_head:
        tensors |= {name: model.tensors[name] for name in _OF_THE_HEAD if name in model.tensors}
    elif _NORM in model.tensors:  # LFM2 has another, which all parts get
        tensors[_NORM] = _hole((width,), "F32")
    if has_embedding or (has_head and head is None):
        tensors[EMBEDDING] = embedding
    else:
        vocab = vocab if has_head else DUMMY_VOCAB
        tensors[EMBEDDING] = _hole((width, vocab), embedding.type)
    if not has_head and head is not None:
        tensors[HEAD] = _hole((width, vocab), head.type)
    return tensors


def layer_count(model: GGUF) -> int:
    """Layers that predict the next token; those for later ones come after them."""
    layers = model.number("{arch}.block_count") - model.number("{arch}.nextn_predict_layers", 0)
    stored = {match[1] for name in model.tensors if (match := _LAYER.fullmatch(name))}
    if not 0 < layers <= len(stored):
        raise CheckpointError(
            f"{model.files[0]}: {layers} layers, and tensors of {len(stored)}; fetch it again"
        )
    return layers


def refused(model: GGUF, spans: Iterable[Span]) -> dict[Span, str]:
    """Those of ``spans`` whose layers cannot be computed by themselves, each with the reason."""
    layers, windows = layer_count(model), _windows(model)
    problems = {span: _span_problem(model, span, layers, windows) for span in spans}
    return {span: problem for span, problem in problems.items() if problem}


def _span_problem(
    model: GGUF, span: Span, layers: int, windows: Sequence[object] | None
) -> str | None:
    family, (first, last) = model.architecture, span
    if span != (0, layers) and family not in FAMILIES:
        return (
            f"{model.files[0]}: a {family} model cannot be cut into stages; use one stage, or "
            f"{', '.join(sorted(FAMILIES))}"
        )
    depths = BY_DEPTH.get(family, frozenset())
    if span != (0, layers) and not depths.isdisjoint((layers, last - first)):
        return (
            f"{model.files[0]}: llama.cpp cannot compute {last - first} of {layers} layers of "
            f"{family} by themselves; use other or fewer stages"
        )
    kinds = recurrent_layers(model, layers)
    caches = kv_heads(model, layers)
    if any(kinds) and any(caches) and not (any(kinds[first:last]) and any(caches[first:last])):
        return (
            f"{model.files[0]}: layers {first} to {last - 1} are not both recurrent ones and "
            "attention, which llama.cpp cannot compute; use other or fewer stages"
        )
    if windows is not None and not any(windows[first:last]):
        return (
            f"{model.files[0]}: of layers {first} to {last - 1} none has a sliding window, which "
            "llama.cpp cannot compute; use other or fewer stages"
        )
    return None


def _windows(model: GGUF) -> list[Any] | None:
    """By layer, whether it has a sliding window; None for a model without any."""
    family, layers = model.architecture, layer_count(model)
    # Gemma 2 has windows also where its file does not say so.
    windowed = family == "gemma2" or f"{family}.attention.sliding_window" in model.metadata
    if family not in PATTERNS or not windowed:
        return None
    listed = model.get(_PATTERN, PATTERNS[family])
    if isinstance(listed, list):
        return listed
    full = model.number(_PATTERN, PATTERNS[family])
    return [full == 0 or layer % full < full - 1 for layer in range(layers)]


def _metadata(model: GGUF, first: int, last: int, vocab: int) -> dict[str, Value]:
    family, layers = model.architecture, layer_count(model)
    metadata = {
        key: content
        for key, content in model.metadata.items()
        if not key.startswith(_LEFT_OUT) and key != f"{family}.nextn_predict_layers"
    }
    for key, content in metadata.items():
        listed = content.get() if key.startswith(f"{family}.") else None
        if isinstance(listed, list) and len(listed) >= layers and not key.endswith(_SECTIONS):
            kind = int.from_bytes(content.raw[4:8], "little")
            metadata[key] = value(kind, listed[first:last])
    windows = _windows(model)
    if windows is not None and not isinstance(model.get(_PATTERN), list):
        metadata[_PATTERN.format(arch=family)] = value(7, windows[first:last])
    kinds = recurrent_layers(model, layers)[first:last]
    for key, listed in listed_layers(model, kinds).items():
        metadata[key] = value(7, listed)
    if f"{family}.leading_dense_block_count" in metadata:
        dense = model.number("{arch}.leading_dense_block_count")
        metadata[f"{family}.leading_dense_block_count"] = value(4, max(0, dense - first))
    if first:
        metadata.pop(f"{family}.embedding_scale", None)
    return metadata | {
        f"{family}.block_count": value(4, last - first),
        f"{family}.vocab_size": value(4, vocab),
        "tokenizer.ggml.model": value(STRING, "no_vocab"),
    }


def matrix(model: GGUF, name: str) -> Tensor:
    """A tensor [width, height] that every model has. Raises ``CheckpointError``."""
    tensor = model.tensors.get(name)
    if tensor is None or len(tensor.shape) != 2:
        raise CheckpointError(f"{model.files[0]} has no {name}; it is no whole language model")
    return tensor


def _hole(shape: tuple[int, ...], kind: str) -> Tensor:
    return Tensor(shape, kind, tensor_bytes(shape, kind))


class VirtualFile:
    """The bytes of a GGUF file that consists of a header and of tensors in other files."""

    def __init__(self, metadata: Mapping[str, Value], tensors: Mapping[str, Tensor]) -> None:
        self._header = header(metadata, tensors)
        self._starts: list[int] = []
        self._tensors = tuple(tensors.values())
        at = len(self._header)
        for tensor in self._tensors:
            self._starts.append(at)
            at += tensor.size + -tensor.size % 32
        self.size = at
        self._open: dict[Path, int] = {}

    def close(self) -> None:
        """Close the files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def read(self, at: int, into: memoryview) -> int:
        """Fill ``into`` with the bytes from ``at`` on, as far as there are. Bytes of holes, and
        between tensors, are left as they are. Raises ``OSError``."""
        length = min(len(into), self.size - at)
        done = 0
        while done < length:
            done += self._some(at + done, into[done:length])
        return max(0, length)

    def _some(self, at: int, into: memoryview) -> int:
        if at < len(self._header):
            part = self._header[at : at + len(into)]
            into[: len(part)] = part
            return len(part)
        number = bisect_right(self._starts, at) - 1
        tensor = self._tensors[number]
        start, following = self._starts[number], self._starts[number + 1 : number + 2]
        past = at - start
        if past >= tensor.size or tensor.file is None:
            return min(len(into), (following[0] if following else self.size) - at)
        into = into[: tensor.size - past]
        got = os.preadv(self._descriptor(tensor.file), [into], tensor.offset + past)
        if not got:
            raise OSError(f"{tensor.file} has become shorter")
        return got

    def _descriptor(self, file: Path) -> int:
        if file not in self._open:
            self._open[file] = os.open(file, os.O_RDONLY)
        return self._open[file]
