"""Which model families work, and why the others do not. No torch: the CLI asks before loading.

A family is listed only if the tests of this repository run it (tests/backend/test_families.py).
The stage code is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncspec.errors import CheckpointError

SUPPORTED = frozenset(
    {
        "GemmaForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "GraniteForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Olmo2ForCausalLM",
        "OlmoeForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "SmolLM3ForCausalLM",
    }
)

# Of these, the ones with experts: a softmax router, and gated experts.
EXPERTS = frozenset({"MixtralForCausalLM", "OlmoeForCausalLM", "Qwen3MoeForCausalLM"})

# RoPE types whose frequencies do not depend on how long the sequence is at the moment. The others
# would turn the keys of a whole tree with its longest branch.
FIXED_ROPE = frozenset({"default", "linear", "llama3", "yarn"})

_LINEAR_LAYERS = ("linear_attention", "mamba", "recurrent", "conv", "ssm")


def refuse_unsupported(config: Mapping[str, Any], where: object) -> None:
    """Raise ``CheckpointError`` with the reason where a ``config.json`` cannot work here."""
    reason = _reason(config)
    if reason:
        raise CheckpointError(f"{where} cannot be used: {reason}")
    name = architecture(config)
    if name not in SUPPORTED:
        known = ", ".join(sorted(n.removesuffix("ForCausalLM") for n in SUPPORTED))
        raise CheckpointError(
            f"{where} is a {name or 'model of unknown architecture'}, which is not supported; "
            f"use one of: {known}"
        )


def architecture(config: Mapping[str, Any]) -> str:
    """The model class a checkpoint asks for, "" if it does not say."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def _reason(config: Mapping[str, Any]) -> str:
    name = architecture(config)
    if config.get("is_encoder_decoder"):
        return "encoder-decoder models have no single chain of layers to cut into stages"
    # Some programs write null where there is none.
    if config.get("text_config") is not None or config.get("vision_config") is not None:
        return "multimodal models are not supported; use the text-only checkpoint"
    if config.get("quantization_config") is not None:
        return (
            f"its weights are quantised{_method(config)}; use the unquantised checkpoint, "
            "which --quantize int8 or int4 makes as small"
        )
    kinds = config.get("layer_types") or config.get("layers_block_type") or []
    if any(str(kind).startswith(_LINEAR_LAYERS) for kind in kinds) or any(
        word in name for word in ("Mamba", "Rwkv", "Recurrent", "Xlstm")
    ):
        return "layers with recurrent state cannot verify a tree, only a chain"
    if config.get("kv_lora_rank"):
        return "latent attention (MLA) is not supported"
    if config.get("num_kv_shared_layers"):
        return "layers that share keys and values cannot be cut apart"
    if _experts(config) and name not in EXPERTS:
        known = ", ".join(sorted(n.removesuffix("ForCausalLM") for n in EXPERTS))
        return f"mixture-of-experts layers are supported of {known} only"
    if config.get("use_bidirectional_attention"):
        return "its rows look at later tokens, so it cannot go on with a text"
    return _rope_reason(config, longrope=name == "Phi3ForCausalLM")


def _method(config: Mapping[str, Any]) -> str:
    quantised = config["quantization_config"]
    name = quantised.get("quant_method") if isinstance(quantised, dict) else None
    return f" by {name}" if isinstance(name, str) else ""


def _experts(config: Mapping[str, Any]) -> bool:
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((config.get(name) or 0) > 1 for name in names)


def scaling_kind(rope: Mapping[str, Any]) -> str:
    """Of one set of RoPE parameters, as transformers names it."""
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _rope_reason(config: Mapping[str, Any], *, longrope: bool) -> str:
    """``longrope``: that is what transformers means by this family's "yarn"."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key) or {}
        if not isinstance(rope, dict):
            return f"its {key} is {rope!r}, expected an object or null"
        # Gemma 3 has one set of parameters for each kind of layer.
        sets = [rope, *(value for value in rope.values() if isinstance(value, dict))]
        for one in sets:
            kind = scaling_kind(one)
            if kind not in FIXED_ROPE or (longrope and kind == "yarn"):
                return f"RoPE scaling {kind!r} changes with the length of the sequence"
    return ""
