"""An EAGLE head's tensors as they are computed with; what it lacks comes from its target."""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncspec.backend.hf.checkpoint import (
    Checkpoint,
    head_is_embedding,
    read_tensor,
    stored_type,
)
from asyncspec.backend.hf.dense import dense_linear, kept_type
from asyncspec.backend.hf.eagle.checkpoint import EagleCheckpoint
from asyncspec.backend.hf.eagle.geometry import LAYER
from asyncspec.backend.hf.eagle.layout import EMBEDDING, HEAD
from asyncspec.backend.hf.embedding import KeptEmbedding
from asyncspec.backend.hf.linear import RowwiseLinear
from asyncspec.backend.hf.recipe import FAST
from asyncspec.backend.hf.weights import EMBEDDING as TARGET_EMBEDDING
from asyncspec.backend.hf.weights import HEAD as TARGET_HEAD
from asyncspec.backend.hf.weights import TensorInfo
from asyncspec.errors import CheckpointError

Norm = Callable[[torch.Tensor], torch.Tensor]


class Weights:
    """Reads tensors in one type, each when it is asked for."""

    def __init__(self, head: EagleCheckpoint, target: Checkpoint, dtype: torch.dtype) -> None:
        self.geometry = head.geometry
        self.ids = head.ids
        self.dtype = dtype
        self._head = head
        self._target = target

    def of_layer(self, name: str) -> RowwiseLinear:
        """A linear part of the head's only layer, with its bias if it has one."""
        return self.linear(LAYER[self.geometry.kind] + name)

    def norm_of_layer(self, name: str) -> Norm:
        """An RMSNorm of the head's only layer."""
        return self.norm(LAYER[self.geometry.kind] + name)

    def linear(self, name: str) -> RowwiseLinear:
        """A linear part, with its bias if it has one."""
        bias = f"{name}.bias"
        return self._matrix(f"{name}.weight", self._read(bias) if self._has(bias) else None)

    def norm(self, name: str) -> Norm:
        """An RMSNorm [..., hidden] -> [..., hidden]."""
        weight, eps = self._read(f"{name}.weight"), self.geometry.eps

        def apply(x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

        return apply

    def embedding(self) -> KeptEmbedding:
        """The head's own embedding, or else its target's: [vocab, hidden]."""
        own = self._has(EMBEDDING)
        weight = self._kept(EMBEDDING) if own else self._kept_of_target(TARGET_EMBEDDING)
        return KeptEmbedding(weight, self.dtype)

    def judge(self) -> RowwiseLinear:
        """What turns a guess into logits: EAGLE-3's own ``lm_head``, else the target's."""
        if self._has(HEAD):
            return self._matrix(HEAD, None)
        tied = head_is_embedding(self._target, self.dtype)
        return self._linear(self._kept_of_target(TARGET_EMBEDDING if tied else TARGET_HEAD), None)

    def _has(self, name: str) -> bool:
        return name in self._head.tensors

    def _read(self, name: str) -> torch.Tensor:
        return self._head.tensors[name].read(self.dtype)

    def _kept(self, name: str) -> torch.Tensor:
        """A matrix of the head's own, in the type it is kept in."""
        stored = self._head.tensors[name]
        return stored.read(kept_type(stored.dtype, self.dtype))

    def _kept_of_target(self, name: str) -> torch.Tensor:
        """As ``_kept``, of the target."""
        info = self._info(name)
        return read_tensor(info, kept_type(stored_type(info), self.dtype))

    def _matrix(self, name: str, bias: torch.Tensor | None) -> RowwiseLinear:
        return self._linear(self._kept(name), bias)

    def _linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> RowwiseLinear:
        # Guesses need not be blind to the number of rows.
        return dense_linear(weight, bias, FAST, self.dtype)

    def _info(self, name: str) -> TensorInfo:
        """A matrix of the target that is as large as its embedding."""
        info = self._target.tensors.get(name)
        facts = self._target.facts
        want = (facts.vocab_size, facts.hidden_size)
        if info is None or info.shape != want:
            found = "no" if info is None else f"a {list(info.shape)}"
            raise CheckpointError(
                f"the target {self._target.path} has {found} tensor {name}, expected one of shape "
                f"{list(want)}, which the EAGLE head {self._head.path} shares with it"
            )
        self._target.fetch((info,))
        return info
