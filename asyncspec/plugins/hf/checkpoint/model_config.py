"""What a checkpoint is, and whether it can run here, from its JSON files alone."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from asyncspec.backend.base import ModelInfo
from asyncspec.core.errors import CheckpointError
from asyncspec.plugins.hf.checkpoint.formats.settings import SETTINGS, refusal
from asyncspec.plugins.hf.checkpoint.tokenizer import end_token

GENERATION_CONFIG = "generation_config.json"

EXPERTS = frozenset(
    {
        "Cohere2MoeForCausalLM",
        "DeepseekV32ForCausalLM",
        "DeepseekV3ForCausalLM",
        "GlmMoeDsaForCausalLM",
        "Glm4MoeForCausalLM",
        "ExaoneMoeForCausalLM",
        "FlexOlmoForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GptOssForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "KimiLinearForCausalLM",
        "Lfm2MoeForCausalLM",
        "Llama4ForCausalLM",
        "MiniMaxM2ForCausalLM",
        "MixtralForCausalLM",
        "NemotronHForCausalLM",
        "OlmoeForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "SolarOpenForCausalLM",
    }
)
"""Families whose gated experts become linear layers of their own (``experts.py``)."""

RECURRENT = frozenset(
    {
        "BambaForCausalLM",
        "FalconH1ForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "KimiLinearForCausalLM",
        "Lfm2ForCausalLM",
        "Lfm2MoeForCausalLM",
        "NemotronHForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
    }
)
"""Families with layers that have a state (``recurrent_layers.py``)."""

SPARSE = frozenset({"DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"})
"""Families whose rows attend to the ``index_topk`` tokens that an indexer chooses; here to all, so
that is the longest context."""

LATENT = SPARSE | {
    *("DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "KimiLinearForCausalLM"),
    "YoutuForCausalLM",
}
"""Families with latent attention (``latent.py``)."""

_OTHERS = (
    *("Apertus", "Arcee", "BitNet", "Cohere", "Cohere2", "Cwm", "Ernie4_5"),
    *("Exaone4", "Gemma", "Gemma2", "Gemma3", "Gemma4", "Glm", "Glm4"),
    *("Granite", "HyperCLOVAX", "Llama", "Ministral3", "Mistral", "Olmo", "Olmo2", "Olmo3"),
    *("Phi3", "Qwen2", "Qwen3", "SeedOss", "SmolLM3", "Starcoder2", "VaultGemma"),
    "Youtu",
)
SUPPORTED = EXPERTS | RECURRENT | {f"{name}ForCausalLM" for name in _OTHERS}
"""Model families that tests/backend/test_families.py runs; all use the same stage code."""

TEXT_PARTS: Mapping[str, str] = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "Kimi_K25ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
"""Multimodal models, and the family of their language model, which runs alone here."""

FIXED_ROPE = frozenset({"default", "linear", "llama3", "proportional", "yarn"})
"""RoPE types whose frequencies do not depend on the length of the sequence: with the others, the
longest branch would rotate the keys of a whole tree."""

_EOS = "eos_token_id"
_COMMON = ("dtype", _EOS, *SETTINGS, "torch_dtype")
"""Settings that may stand beside those of the language model."""

_LINEAR_LAYERS = ("linear_attention", "mamba", "recurrent", "conv", "ssm")
_LINEAR_FAMILIES = ("Mamba", "Rwkv", "Recurrent", "Xlstm")


def read_config(directory: Path) -> dict[str, Any]:
    """``config.json`` as it is. Raises ``CheckpointError`` where it is missing or broken."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory; give a checkpoint's directory")
    file = directory / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{directory} has no config.json; give a Hugging Face checkpoint")
    return _read_json(file)


def read_generation_config(directory: Path) -> dict[str, Any]:
    """Its content, {} where there is no file; a ``top_k`` of -1 means none, as 0 does. Raises
    ``CheckpointError`` for a broken one."""
    file = directory / GENERATION_CONFIG
    content = _read_json(file) if file.is_file() else {}
    return content | {"top_k": 0} if content.get("top_k") == -1 else content


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = file.read_bytes().removeprefix(BOM_UTF8)
        # Python's own: Mamba-2's bounds are written as Infinity, which is no JSON.
        return msgspec.convert(json.loads(content), dict[str, Any])
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); download it again") from error


def inspect_checkpoint(directory: Path) -> ModelInfo:
    """The configuration of a supported causal LM. Raises ``CheckpointError`` for another."""
    config = text_config(read_config(directory))
    name = architecture(config)
    if reason := _unsupported(config, name):
        raise CheckpointError(f"{directory} cannot be used: {reason}")
    if name not in SUPPORTED:
        raise CheckpointError(
            f"{directory} is a {name or 'model of unknown architecture'}, which is not supported; "
            f"use one of: {_families(SUPPORTED)}"
        )
    return ModelInfo(
        architecture=name,
        layers=_layers(config, directory),
        hidden_size=_number(config, "hidden_size", directory),
        vocab_size=_number(config, "vocab_size", directory),
        context_length=context_length(config, directory),
        eos_token_ids=_eos_token_ids(config, directory),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or ""),
        shares_prefixes=name not in RECURRENT,
        keeps_states=name in RECURRENT,
        context_reason="the top-k of its sparse attention" if name in SPARSE else "",
    )


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's configuration in a multimodal model's; any other as it is."""
    text, name = config.get("text_config"), TEXT_PARTS.get(architecture(config))
    if name is None or not isinstance(text, dict):
        return config
    common = {key: config[key] for key in _COMMON if config.get(key) is not None}
    kept = {
        key: value
        for key, value in text.items()
        # As in transformers: inside, it may be the default of the language model's class.
        if key not in common or (value is not None and key != _EOS)
    }
    return {**common, **kept, "architectures": [name]}


def architecture(config: Mapping[str, Any]) -> str:
    """The model class that a configuration names, "" if it names none."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def context_length(config: Mapping[str, Any], where: Path) -> int:
    """Longest sequence, prompt and answer, that a model was made for, in tokens: with YaRN the
    original length times its factor, whatever ``max_position_embeddings`` says. transformers looks
    for the two in the same places, and vLLM derives the same. With linear scaling, files do not
    tell whether their length is the stretched one."""
    name = "max_position_embeddings"
    if name not in config and "model_max_length" in config:  # Kimi Linear
        name = "model_max_length"
    length = _number(config, name, where)
    if architecture(config) in SPARSE:
        return min(length, _number({"index_topk": 2048} | {**config}, "index_topk", where))
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    # Gemma 3's is always the stretched one.
    if scaling_kind(rope) != "yarn" or architecture(config) == "Gemma3ForCausalLM":
        return length
    factor = rope.get("factor")
    if factor is None:
        return length  # transformers derives the factor from the two lengths
    if not isinstance(factor, int | float) or isinstance(factor, bool) or factor <= 0:
        raise CheckpointError(f"config.json of {where} needs a positive number as factor")
    name = "original_max_position_embeddings"
    sources = (source for source in (config, rope) if source.get(name) is not None)
    return int(_number(next(sources, {name: length}), name, where) * factor)


def _number(config: Mapping[str, Any], name: str, where: Path) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise CheckpointError(f"config.json of {where} needs a positive number as {name}")
    return value


def _layers(config: Mapping[str, Any], directory: Path) -> int:
    """The number of layers; Nemotron-H may have a list or a string of their kinds alone."""
    kinds = config.get("layers_block_type") or config.get("hybrid_override_pattern")
    if isinstance(kinds, list | str):
        return len(kinds)
    return _number(config, "num_hidden_layers", directory)


def _eos_token_ids(config: Mapping[str, Any], directory: Path) -> tuple[int, ...]:
    """Tokens that end an answer: ``generation_config.json`` decides, then ``config.json``, then the
    tokenizer."""
    value = read_generation_config(directory).get(_EOS)
    value = config.get(_EOS) if value is None else value
    value = end_token(directory) if value is None else value
    if value is None:
        return ()
    try:
        return msgspec.convert(value if isinstance(value, list) else [value], tuple[int, ...])
    except msgspec.ValidationError as error:
        raise CheckpointError(
            f"{_EOS} of {directory} is neither a number nor a list of them"
        ) from error


def _unsupported(config: Mapping[str, Any], name: str) -> str:
    """The reason why a model cannot work here, "" if there is none that its settings tell."""
    if config.get("is_encoder_decoder"):
        return "encoder-decoder models have no single chain of layers to cut into stages"
    # Some programs write null where there is none.
    if config.get("text_config") is not None or config.get("vision_config") is not None:
        return "multimodal models are not supported; use the text-only checkpoint"
    if reason := refusal(config):
        return reason
    kinds = config.get("layer_types") or config.get("layers_block_type") or []
    if name not in RECURRENT and (
        any(str(kind).startswith(_LINEAR_LAYERS) for kind in kinds)
        or any(family in name for family in _LINEAR_FAMILIES)
    ):
        return "its layers with a recurrent state are of a kind that is not supported"
    if config.get("kv_lora_rank") and name not in LATENT:
        return f"latent attention (MLA) is supported of {_families(LATENT)} only"
    if config.get("num_kv_shared_layers") and name != "Gemma4ForCausalLM":
        return "layers that share keys and values cannot be cut apart"
    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    if name not in EXPERTS and any((config.get(count) or 0) > 1 for count in counts):
        return f"mixture-of-experts layers are supported of {_families(EXPERTS)} only"
    if config.get("use_bidirectional_attention"):
        return "its rows look at later tokens, so it cannot go on with a text"
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key) or {}
        if not isinstance(rope, dict):
            return f"its {key} is {rope!r}, expected an object or null"
        # Gemma 3 has one set of parameters for each kind of layer.
        for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
            kind = scaling_kind(parameters)
            # In Phi 3, transformers reads "yarn" as "longrope".
            if kind not in FIXED_ROPE or (kind == "yarn" and name == "Phi3ForCausalLM"):
                return f"RoPE scaling {kind!r} changes with the length of the sequence"
    return ""


def _families(architectures: frozenset[str]) -> str:
    return ", ".join(sorted(name.removesuffix("ForCausalLM") for name in architectures))


def scaling_kind(rope: Mapping[str, Any]) -> str:
    """The kind of one set of RoPE parameters, as transformers names it."""
    return str(rope.get("rope_type") or rope.get("type") or "default")
