"""Tiny random checkpoints of every family, whose logits are far enough apart to be compared."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

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

GATED_DELTA = {
    "head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "layer_types": ["linear_attention", "full_attention"] + ["linear_attention"] * 3,
}
SHARED_EXPERTS = {
    "moe_intermediate_size": 36,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "shared_expert_intermediate_size": 44,
}
NEMOTRON_LAYERS = ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"]
# Routers in groups, one dense layer, shared experts.
DEEPSEEK = {
    "moe_intermediate_size": 36,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 2,
}
GRANITE4 = {
    "layer_types": ["mamba", "attention", "mamba", "mamba", "attention"],
    "shared_intermediate_size": 100,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
    "position_embedding_type": "nope",
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.2,
}
INDEXED = {"index_topk": 256, "index_head_dim": 24, "index_n_heads": 2}
# Keys of 40 numbers, values of 24, for each of the heads.
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 24,
}
FAMILIES |= {
    "gpt-oss": (
        "gpt_oss",
        {
            "head_dim": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            "layer_types": ALTERNATING,
        },
    ),
    "qwen3.5": ("qwen3_5_text", GATED_DELTA),
    "deepseek-v3": ("deepseek_v3", DEEPSEEK | LATENT),
    "lfm2": (
        "lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": True,
        },
    ),
    "nemotron-h": (
        "nemotron_h",
        {
            "layers_block_type": NEMOTRON_LAYERS,
            "head_dim": 32,
            "ssm_state_size": 16,
            "mamba_num_heads": 6,
            "mamba_head_dim": 20,
            "n_groups": 2,
            "conv_kernel": 4,
            "chunk_size": 8,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 36,
            "moe_shared_expert_intermediate_size": 44,
            "moe_latent_size": 40,
            # Bounds that transformers applies to prompts alone are out of reach.
            "time_step_min": 1e-9,
            "time_step_floor": 0.02,
        },
    ),
    # Mamba-2 beside attention in every layer.
    "falcon-h1": (
        "falcon_h1",
        {
            "head_dim": 32,
            "mamba_d_ssm": 96,
            "mamba_n_heads": 6,
            "mamba_d_head": 16,
            "mamba_n_groups": 2,
            "mamba_d_state": 12,
            "embedding_multiplier": 3.0,
            "key_multiplier": 0.8,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.7,
            "ssm_in_multiplier": 1.1,
            "ssm_out_multiplier": 0.9,
            "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
            "mlp_multipliers": [1.2, 0.8],
            "lm_head_multiplier": 1.5,
        },
    ),
    # Decays by channel, latent attention without positions, experts but in the first layer.
    "kimi-linear": (
        "kimi_linear",
        {
            **{key: value for key, value in LATENT.items() if key != "q_lora_rank"},
            "linear_num_heads": 3,
            "linear_head_dim": 24,
            "layer_types": ["linear_attention", "full_attention"] * 2 + ["linear_attention"],
            "moe_intermediate_size": 36,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "gemma4": (
        "gemma4_text",
        {
            "head_dim": 32,
            "global_head_dim": 48,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "sliding_window": 16,
            "layer_types": ["sliding_attention"] * 2
            + ["full_attention", "sliding_attention"]
            + ["full_attention"],
            "tie_word_embeddings": True,
        },
    ),
}

PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5-moe": ("qwen3_5_moe_text", GATED_DELTA | SHARED_EXPERTS),
    "qwen3-next": (
        "qwen3_next",
        GATED_DELTA | SHARED_EXPERTS | {"decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "deepseek-v3-one-query": ("deepseek_v3", DEEPSEEK | LATENT | {"q_lora_rank": None}),
    "deepseek-v3.2": ("deepseek_v32", DEEPSEEK | LATENT | INDEXED),
    "glm-5": (
        "glm_moe_dsa",
        DEEPSEEK
        | LATENT
        | INDEXED
        | {"indexer_types": ["full", "full", "shared", "full", "shared"]},
    ),
    "glm4-moe-lite": ("glm4_moe_lite", DEEPSEEK | LATENT),
    "glm4-moe": ("glm4_moe", DEEPSEEK | {"head_dim": 32, "use_qk_norm": True}),
    "apertus": ("apertus", {}),
    "arcee": ("arcee", {}),
    "bitnet": ("bitnet", {}),
    "cohere": ("cohere", {"logit_scale": 0.5}),
    "cohere2": ("cohere2", {"sliding_window": 16, "layer_types": ALTERNATING}),
    "cohere2-moe": (
        "cohere2_moe",
        {"head_dim": 32, "sliding_window": 16, "layer_types": ALTERNATING} | SHARED_EXPERTS,
    ),
    "cwm": ("cwm", {"head_dim": 32, "sliding_window": 16, "layer_types": ALTERNATING}),
    "ernie4.5": ("ernie4_5", {"head_dim": 32}),
    "exaone4": ("exaone4", {"sliding_window": 16, "layer_types": ALTERNATING}),
    "exaone-moe": (
        "exaone_moe",
        {
            "moe_intermediate_size": 36,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_shared_experts": 1,
            "sliding_window": 16,
            "layer_types": ALTERNATING,
        },
    ),
    "flex-olmo": ("flex_olmo", {"num_experts": 8, "num_experts_per_tok": 3}),
    "glm": ("glm", {"head_dim": 32}),
    "glm4": ("glm4", {"head_dim": 32}),
    "hyperclovax": ("hyperclovax", {"attention_multiplier": 0.2, "residual_multiplier": 0.5}),
    "ministral3": ("ministral3", {"head_dim": 32}),
    "olmo": ("olmo", {"clip_qkv": 2.0}),
    "olmo3": ("olmo3", {"sliding_window": 16, "layer_types": ALTERNATING}),
    "qwen2-moe": ("qwen2_moe", SHARED_EXPERTS),
    # Its masks alone have the window.
    "qwen2-moe-window": (
        "qwen2_moe",
        SHARED_EXPERTS
        | {"use_sliding_window": True, "sliding_window": 16, "layer_types": ALTERNATING},
    ),
    "seed-oss": ("seed_oss", {"head_dim": 32}),
    "solar-open": ("solar_open", DEEPSEEK | {"head_dim": 32}),
    "starcoder2": ("starcoder2", {"sliding_window": 16}),
    "vaultgemma": ("vaultgemma", {"head_dim": 32, "sliding_window": 16}),
    "youtu": ("youtu", LATENT),
    "lfm2-moe": (
        "lfm2_moe",
        {
            "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"],
            "num_dense_layers": 2,
            "moe_intermediate_size": 36,
            "num_experts": 8,
            "num_experts_per_tok": 3,
        },
    ),
    "falcon-h1-norm": (
        "falcon_h1",
        {
            "head_dim": 32,
            "mamba_d_ssm": 96,
            "mamba_n_heads": 6,
            "mamba_d_head": 16,
            "mamba_d_state": 12,
            "mamba_rms_norm": True,
            "tie_word_embeddings": True,
        },
    ),
    "bamba": (
        "bamba",
        {
            "head_dim": 32,
            "attn_layer_indices": [1, 4],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_n_groups": 2,
            "mamba_d_state": 12,
        },
    ),
    "granite4-h": ("granitemoehybrid", GRANITE4 | {"num_local_experts": 0}),
    "granite4-h-moe": (
        "granitemoehybrid",
        GRANITE4 | {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 36},
    ),
    "minimax-m2": (
        "minimax_m2",
        {"head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 16},
    ),
    # Chunks of attention, layers without rotary embedding whose queries grow, experts in some.
    "llama4": (
        "llama4_text",
        {
            "head_dim": 32,
            "intermediate_size_mlp": 100,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 1, 0, 1, 1],
            "attention_chunk_size": 16,
            "floor_scale": 8,
        },
    ),
}
"""Families with the parts of those in ``FAMILIES``, tried in fewer ways."""

OWN_CODE = frozenset(
    {
        "gpt-oss",
        "qwen3.5",
        "deepseek-v3",
        "gemma4",
        "lfm2",
        "nemotron-h",
        "falcon-h1",
        "kimi-linear",
    }
)
"""Those of ``FAMILIES`` whose layers run in transformers' own code."""

for _families in (FAMILIES, PLAIN):
    # Older releases of transformers have fewer.
    for _name in [n for n, (kind, _) in _families.items() if kind not in CONFIG_MAPPING]:
        del _families[_name]


def save_tiny(directory: Path, family: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """A random checkpoint of a family in float32, or as ``dtype`` says."""
    dtype = changes.pop("dtype", torch.float32)
    shard_size = changes.pop("max_shard_size", "1GB")
    original = changes.pop("save_original_format", True)
    model_type, special = (FAMILIES | PLAIN)[family]
    config = AutoConfig.for_model(model_type, **{**COMMON, **special, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, seed)
    if model_type.startswith("gemma"):
        # They scale embeddings up, which are heads as well: every token would follow itself.
        model.get_input_embeddings().weight.data.mul_(0.02)
    model.to(dtype).save_pretrained(
        directory, max_shard_size=shard_size, save_original_format=original
    )
    return directory


def generated(path: Path, prompt: list[int], count: int, **how: Any) -> list[int]:
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
        **how,
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
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
