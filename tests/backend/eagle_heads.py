"""Random EAGLE heads in every published format, tensor by tensor as their owners save them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from backend.tiny import VOCAB

HIDDEN = 64
FFN = 100
HEADS = 4
KV_HEADS = 2
TARGET_LAYERS = 8
TARGET: dict[str, Any] = {"num_hidden_layers": TARGET_LAYERS}
"""What to change in a tiny checkpoint to make it the target of these heads."""

WEIGHTS = "model.safetensors"

State = dict[str, torch.Tensor]


@dataclass
class Sizes:
    """Of a head; the defaults fit the tiny target."""

    hidden: int = HIDDEN
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    head_dim: int = HIDDEN // HEADS
    vocab: int = VOCAB
    layers: int = 1
    config: dict[str, Any] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        """The ``config.json`` of a published head."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": FFN,
            "max_position_embeddings": 2048,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "num_hidden_layers": self.layers,
            "rms_norm_eps": 1e-5,
            "vocab_size": self.vocab,
            **self.config,
        }


class Dice:
    """Weights that keep signals near 1."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int, gain: float = 1.5) -> torch.Tensor:
        return self.normal(rows, columns) * gain / math.sqrt(columns)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator)

    def scale(self, size: int) -> torch.Tensor:
        return 1 + 0.1 * self.normal(size)


def _layer(
    dice: Dice,
    sizes: Sizes,
    prefix: str,
    into: int,
    *,
    bias: bool,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> State:
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    state = {
        "self_attn.q_proj.weight": dice.matrix(queries, into),
        "self_attn.k_proj.weight": dice.matrix(keys, into),
        "self_attn.v_proj.weight": dice.matrix(keys, into),
        "self_attn.o_proj.weight": dice.matrix(sizes.hidden, queries),
        "mlp.gate_proj.weight": dice.matrix(FFN, sizes.hidden),
        "mlp.up_proj.weight": dice.matrix(FFN, sizes.hidden),
        "mlp.down_proj.weight": dice.matrix(sizes.hidden, FFN),
        "post_attention_layernorm.weight": dice.scale(sizes.hidden),
    }
    if bias:
        for name, width in (("q", queries), ("k", keys), ("v", keys)):
            state[f"self_attn.{name}_proj.bias"] = dice.normal(width)
    if mlp_bias:
        for name, width in (("gate", FFN), ("up", FFN), ("down", sizes.hidden)):
            state[f"mlp.{name}_proj.bias"] = dice.normal(width)
    if qk_norm:
        for name in "qk":
            state[f"self_attn.{name}_norm.weight"] = 2 * dice.scale(sizes.head_dim)
    return {prefix + name: tensor for name, tensor in state.items()}


def eagle(
    sizes: Sizes | None = None,
    *,
    fc_bias: bool = True,
    qkv_bias: bool = False,
    embed: bool = True,
    seed: int = 0,
) -> State:
    """EAGLE-1/2."""
    sizes = sizes or Sizes()
    dice = Dice(seed)
    state = {"fc.weight": dice.matrix(sizes.hidden, 2 * sizes.hidden)}
    state |= _layer(dice, sizes, "layers.0.", sizes.hidden, bias=qkv_bias)
    state |= _later_layers(dice, sizes, bias=qkv_bias)
    if fc_bias:
        state["fc.bias"] = dice.normal(sizes.hidden)
    if embed:
        state["embed_tokens.weight"] = dice.normal(sizes.vocab, sizes.hidden)
    return state


def _later_layers(dice: Dice, sizes: Sizes, **options: bool) -> State:
    """All but the first."""
    state: State = {}
    for prefix in (f"layers.{i}." for i in range(1, sizes.layers)):
        state |= _layer(dice, sizes, prefix, sizes.hidden, **options)
        state[f"{prefix}input_layernorm.weight"] = dice.scale(sizes.hidden)
    return state


def eagle3(
    sizes: Sizes | None = None,
    *,
    proposes: Sequence[int] | None = None,
    reads: int = HIDDEN,
    depths: int = 3,
    embed: bool = False,
    norm_before_fc: bool = False,
    fc_norm: bool = False,
    bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    seed: int = 0,
) -> State:
    """EAGLE-3. ``proposes``: the target's ids of its draft vocabulary; ``reads``: width of a
    captured hidden state."""
    sizes = sizes or Sizes()
    dice = Dice(seed)
    state = {"fc.weight": dice.matrix(sizes.hidden, depths * reads)}
    options = {"bias": bias, "mlp_bias": mlp_bias, "qk_norm": qk_norm}
    state |= _layer(dice, sizes, "midlayer.", 2 * sizes.hidden, **options)
    state |= _later_layers(dice, sizes, **options)
    if norm_before_fc:
        state["input_norm.weight"] = dice.scale(depths * reads)
    if fc_norm:
        # Far from each other, as depths are.
        state |= {f"fc_norm.{i}.weight": (i + 1) * dice.scale(reads) for i in range(depths)}
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm"):
        state[f"{name}.weight"] = dice.scale(sizes.hidden)
    draft_vocab = sizes.vocab if proposes is None else len(proposes)
    state["lm_head.weight"] = dice.matrix(draft_vocab, sizes.hidden)
    if proposes is not None:
        ids = torch.tensor(proposes)
        state["d2t"] = ids - torch.arange(len(ids))
        state["t2d"] = torch.zeros(sizes.vocab, dtype=torch.bool)
        state["t2d"][ids] = True
    if embed:
        state["embed_tokens.weight"] = dice.normal(sizes.vocab, sizes.hidden)
    return state


def save(directory: Path, state: State, sizes: Sizes | None = None, **settings: Any) -> Path:
    """As ``model.safetensors``."""
    directory.mkdir(exist_ok=True)
    save_file(state, directory / WEIGHTS)
    write_settings(directory, sizes, **settings)
    return directory


def save_speculators(
    directory: Path, state: State, sizes: Sizes | None = None, **settings: Any
) -> Path:
    """As speculators saves a head: numbered layers, nested settings. ``settings`` are the head's;
    those that ``layer`` holds are its layers'."""
    layer = (sizes or Sizes()).settings() | settings.pop("layer", {})
    for name in ("architectures", "rope_theta"):
        layer.pop(name, None)
    if "rope_parameters" not in layer:
        layer["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0}
    verifier = {"architectures": ["LlamaForCausalLM"], "name_or_path": "org/tiny-llama"}
    config = {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": layer["vocab_size"],
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": None,
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "norm_output": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": verifier,
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
    }
    directory.mkdir(exist_ok=True)
    names = {"midlayer.": "layers.0."}
    if settings.get("speculators_model_type") == "eagle":
        names = {"fc.": "fusion_fc.", "layers.0.": "transformer."}
    save_file(
        {
            next(
                (new + name[len(old) :] for old, new in names.items() if name.startswith(old)), name
            ): t
            for name, t in state.items()
        },
        directory / WEIGHTS,
    )
    (directory / "config.json").write_text(json.dumps(config | settings))
    return directory


def save_pickled(
    directory: Path, state: State, sizes: Sizes | None = None, **settings: Any
) -> Path:
    """As ``pytorch_model.bin``."""
    directory.mkdir(exist_ok=True)
    torch.save(state, directory / "pytorch_model.bin")
    write_settings(directory, sizes, **settings)
    return directory


def write_settings(directory: Path, sizes: Sizes | None = None, **settings: Any) -> None:
    """``config.json``."""
    content = (sizes or Sizes()).settings() | settings
    (directory / "config.json").write_text(json.dumps(content))
