"""The EAGLE head: from a feature and the token after it to a guess of the next feature.

Row i reads the feature f_i of position i and the token t_{i+1}, sits at position i and guesses
f_{i+1}, from which come the candidates for t_{i+2} (EAGLE, section 4; EAGLE-3, section 3). In a
tree a node's row reads its parent's guess in place of the feature nobody knows yet.
"""

from __future__ import annotations

import torch

from asyncspec.backend.hf.attention import Tree
from asyncspec.backend.hf.cache import Shape
from asyncspec.backend.hf.checkpoint import Checkpoint, resolve_dtype
from asyncspec.backend.hf.eagle.checkpoint import EagleCheckpoint
from asyncspec.backend.hf.eagle.geometry import Geometry
from asyncspec.backend.hf.eagle.layer import HeadLayer
from asyncspec.backend.hf.eagle.taps import Features
from asyncspec.backend.hf.eagle.weights import Weights
from asyncspec.backend.hf.proposals import best_successors
from asyncspec.source.grow import Proposal


class EagleHead:
    """EAGLE-1/2: feature and token are fused before the layer."""

    def __init__(self, weights: Weights) -> None:
        self.geometry = weights.geometry
        self.features = weights.geometry.features
        self.dtype = weights.dtype
        self.cache_shape = cache_shape(self.geometry, weights.dtype)
        self._embedding = weights.embedding()
        self._fuse = weights.linear("fc")
        self._layer = HeadLayer(weights)
        self._judge = weights.judge()
        self._ids = weights.ids

    def known(self, features: torch.Tensor) -> torch.Tensor:
        """True features [n, ``features.width``] as the layer takes them: [n, H]."""
        return features

    def guess(
        self,
        features: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        tree: Tree,
    ) -> torch.Tensor:
        """The next features [n, H] of some rows: ``features`` [n, H] are known ones or earlier
        guesses, ``tokens`` [n] what follows them."""
        fused = self._fuse(torch.cat([self.embed(tokens), features], dim=-1))
        return self._layer.forward(fused, fused, positions, tree)

    def successors(self, guesses: torch.Tensor, most: int) -> list[Proposal]:
        """The target's tokens that come next, by guesses [n, H]. A reduced vocabulary's
        log-probabilities count only the tokens that are in it."""
        return best_successors(self._judge(self.judged(guesses)), most, self._ids)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [n] -> [n, H]."""
        return self._embedding.forward(tokens)

    def judged(self, guesses: torch.Tensor) -> torch.Tensor:
        """What ``lm_head`` sees of guesses [n, H]: a guessed feature is normed already."""
        return guesses


class Eagle3Head(EagleHead):
    """EAGLE-3: three depths of the target become one feature, and attention reads token and
    feature side by side. A guess is fed back as it is, without ``fc`` and without a norm."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self._norm_token = weights.norm_of_layer("input_layernorm")
        self._norm_feature = weights.norm_of_layer("hidden_norm")
        self._norm_guess = weights.norm("norm")

    def known(self, features: torch.Tensor) -> torch.Tensor:
        """See ``EagleHead``."""
        fused: torch.Tensor = self._fuse(features)
        return fused

    def guess(
        self,
        features: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        tree: Tree,
    ) -> torch.Tensor:
        """See ``EagleHead``."""
        normed = self._norm_feature(features)
        x = torch.cat([self._norm_token(self.embed(tokens)), normed], dim=-1)
        residual = normed if self.geometry.norm_before_residual else features
        return self._layer.forward(x, residual, positions, tree)

    def judged(self, guesses: torch.Tensor) -> torch.Tensor:
        """See ``EagleHead``."""
        return self._norm_guess(guesses)


def cache_shape(geometry: Geometry, dtype: torch.dtype) -> Shape:
    """Of the cache of a head's only layer."""
    return Shape(
        layers=1,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        dtype=dtype,
        exact=False,
    )


def token_bytes(shape: Shape, features: Features) -> int:
    """Bytes held for each token of a session, and for each node of its tree: in the cache, and
    features, which are kept of prompts for others that begin so."""
    return shape.held_bytes() + features.width * shape.dtype.itemsize


def load_head(checkpoint: EagleCheckpoint, target: Checkpoint, dtype: str = "auto") -> EagleHead:
    """Read a head's weights, and from the target those the head shares with it. "auto": the type
    the target is computed in.

    Raises ``UserError`` or ``CheckpointError``.
    """
    with torch.inference_mode():
        weights = Weights(checkpoint, target, resolve_dtype(target, dtype))
        third = checkpoint.geometry.kind == "EAGLE-3"
        return Eagle3Head(weights) if third else EagleHead(weights)
