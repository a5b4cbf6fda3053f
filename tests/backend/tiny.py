"""Tiny random checkpoints of every family, whose logits are far enough apart to be compared."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

LAYERS = 5
VOCAB = 160

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    # No multiple of 32: activation functions have a ragged end.
    "intermediate_size": 100,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-rope3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR_ROPE}),
    "llama-yarn": ("llama", {"rope_parameters": YARN_ROPE}),
    # Odd widths: cos, sin and the head's vectors have ragged ends as well.
    "llama-odd": (
        "llama",
        {"hidden_size": 88, "head_dim": 24, "vocab_size": 151, "attention_bias": True},
    ),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "layer_types": ALTERNATING},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 16}),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "clip_qkv": 2.0}),
    "qwen3-moe": (
        "qwen3_moe",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 36,
            "norm_topk_prob": True,
        },
    ),
    # Which layers have experts changes with their numbers, as they do when the model is cut.
    "qwen3-moe-mixed": (
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 36,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
    ),
    "phi3": ("phi3", {}),
    "gemma": ("gemma", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 32,
            "tie_word_embeddings": True,
            "sliding_window": 16,
            "query_pre_attn_scalar": 32,
            "vocab_size": 151,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 32,
            "tie_word_embeddings": True,
            "sliding_window": 16,
            "query_pre_attn_scalar": 32,
            "layer_types": ALTERNATING,
        },
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
            "attention_multiplier": 0.2,
        },
    ),
    "olmo2": ("olmo2", {}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 1, 0, 1]}),
    # At least one entry a layer is what transformers asks for.
    "smollm3-cut-short": ("smollm3", {"no_rope_layers": [1, 0, 1, 1, 0, 1, 1]}),
}


def save_tiny(directory: Path, family: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """A random checkpoint of a family in float32, or as ``dtype`` says."""
    dtype = changes.pop("dtype", torch.float32)
    shard_size = changes.pop("max_shard_size", "1GB")
    original = changes.pop("save_original_format", True)
    model_type, special = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **{**COMMON, **special, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, seed)
    if model_type.startswith("gemma"):
        # They scale embeddings up, which are heads as well: every token would follow itself.
        model.get_input_embeddings().weight.data.mul_(0.02)
    model.to(dtype).save_pretrained(
        directory, max_shard_size=shard_size, save_original_format=original
    )
    return directory


def generated(path: Path, prompt: list[int], count: int) -> list[int]:
    """What transformers itself says after ``prompt``: greedy, in float32, whatever ends a text."""
    # The attention that transformers 5.10 chooses by itself leaves out the cap on Gemma 2's scores.
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights that keep signals near 1 and give logits a wide spread."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() > 1 and "embed" not in name:
                weight.copy_(noise * 1.5 / math.sqrt(weight.shape[1]))
            elif weight.dim() > 1:
                weight.copy_(noise)
            else:
                weight.add_(noise * 0.1)
