"""Where published checkpoints keep their next-token layer (DeepSeek-V3, section 2.2). No torch.

Row i of it reads the target's last hidden state of position i, behind the final norm, and the
token after it: both are normed, joined and projected, and go through a decoder layer of the
target's own family and a norm. Embedding and head are the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from asyncspec.backend.base import ModelInfo
from asyncspec.core.errors import CheckpointError
from asyncspec.plugins.hf.checkpoint.files.headers import TensorInfo
from asyncspec.plugins.hf.checkpoint.model_config import text_config


class MTPLayout(Struct, frozen=True):
    """Names of the tensors of a next-token layer, as stored."""

    # Prefix of the decoder layer's tensors.
    layer: str
    # RMSNorms of token and hidden state, the matrix that joins the two, and the last norm.
    token_norm: str
    state_norm: str
    join: str
    norm: str
    # The matrix reads the hidden state first, then the token.
    state_first: bool = False
    # Copies of the target's own.
    copies: tuple[str, ...] = ()

    def parts(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors but the decoder layer's, by name."""
        norms = (self.token_norm, self.state_norm, self.norm)
        return {self.join: (hidden, 2 * hidden)} | dict.fromkeys(norms, (hidden,))

    def layer_tensors(self, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """The decoder layer's, by their names within a layer."""
        outside = {*self.parts(1), *self.copies}
        return {
            name.removeprefix(self.layer): info
            for name, info in tensors.items()
            if name.startswith(self.layer) and name not in outside
        }

    def has_experts(self, tensors: Mapping[str, TensorInfo]) -> bool:
        """Whether the decoder layer is a mixture of experts."""
        return any(name.startswith("mlp.experts.") for name in self.layer_tensors(tensors))


def layouts(layers: int) -> tuple[MTPLayout, ...]:
    """The published ones, for a target of so many layers."""
    extra = f"model.layers.{layers}."
    mimo = "model.mtp_layers.0."
    return (
        # DeepSeek-V3, GLM-4.5: the layer after the last.
        MTPLayout(
            layer=extra,
            token_norm=f"{extra}enorm.weight",
            state_norm=f"{extra}hnorm.weight",
            join=f"{extra}eh_proj.weight",
            norm=f"{extra}shared_head.norm.weight",
            copies=(f"{extra}embed_tokens.weight", f"{extra}shared_head.head.weight"),
        ),
        # Qwen3-Next, Qwen3.5.
        MTPLayout(
            layer="mtp.layers.0.",
            token_norm="mtp.pre_fc_norm_embedding.weight",
            state_norm="mtp.pre_fc_norm_hidden.weight",
            join="mtp.fc.weight",
            norm="mtp.norm.weight",
        ),
        # MiMo.
        MTPLayout(
            layer=mimo,
            token_norm=f"{mimo}token_layernorm.weight",
            state_norm=f"{mimo}hidden_layernorm.weight",
            join=f"{mimo}input_proj.weight",
            norm=f"{mimo}final_layernorm.weight",
            state_first=True,
        ),
    )


_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""Settings that say how many next-token layers a model was trained with."""


def counted_layers(config: Mapping[str, Any]) -> int:
    """How many next-token layers ``config.json`` counts; 0 where it says nothing."""
    counts = [text_config(dict(config)).get(name) for name in _COUNTS]
    return max((count for count in counts if isinstance(count, int)), default=0)


def find_mtp(
    path: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], target: ModelInfo
) -> MTPLayout:
    """The layout of the next-token layer in a target's checkpoint; of several layers, the first.
    Raises ``CheckpointError`` where there is none, or a tensor is missing or misshapen."""
    published = layouts(target.layers)
    layout = next((one for one in published if one.join in tensors), None)
    if layout is None:
        names = ", ".join(one.join for one in published)
        if counted_layers(config):
            raise CheckpointError(
                f"{path} was saved without the next-token layers that its config.json counts (it "
                f"has none of {names}); download the original, or use another source than mtp"
            )
        raise CheckpointError(
            f"{path} has no next-token layers (none of the tensors {names}); use another source "
            "than mtp"
        )
    for name, shape in layout.parts(target.hidden_size).items():
        if name not in tensors:
            raise CheckpointError(
                f"{path} has no tensor {name}, which mtp needs; download it again"
            )
        if tensors[name].shape != shape:
            raise CheckpointError(
                f"tensor {name} of {path} has shape {[*tensors[name].shape]}, expected {[*shape]}"
            )
    if not layout.layer_tensors(tensors):
        raise CheckpointError(f"{path} has no tensors {layout.layer}*, which mtp needs")
    return layout
