"""What a checkpoint is, from its JSON files alone: instant, before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from asyncspec.backend.base import ModelInfo
from asyncspec.core.errors import CheckpointError

GENERATION_CONFIG = "generation_config.json"


def read_config(directory: Path) -> dict[str, Any]:
    """``config.json`` as it is. Raises ``CheckpointError`` where it is missing or broken."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory; give a checkpoint's directory")
    file = directory / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{directory} has no config.json; give a Hugging Face checkpoint")
    return _read_json(file)


def inspect_checkpoint(directory: Path) -> ModelInfo:
    """ModelInfo of a causal language model this program can run. Raises ``CheckpointError``."""
    config = read_config(directory)
    refuse_unsupported(config, directory)
    return ModelInfo(
        architecture=architecture(config),
        layers=_number(config, "num_hidden_layers", directory),
        hidden_size=_number(config, "hidden_size", directory),
        vocab_size=_number(config, "vocab_size", directory),
        context_length=_context(config, directory),
        eos_token_ids=_eos(directory, config),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or ""),
    )


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Tokens that end an answer: ``generation_config.json`` decides, then ``config.json``."""
    return _eos(directory, read_config(directory))


def read_generation_config(directory: Path) -> dict[str, Any]:
    """``generation_config.json`` as it is; empty where there is none. Raises ``CheckpointError``
    where it is broken."""
    file = directory / GENERATION_CONFIG
    return _read_json(file) if file.is_file() else {}


def context_length(directory: Path) -> int:
    """Longest sequence, prompt and answer, the model was made for, in tokens."""
    return _context(read_config(directory), directory)


def _context(config: dict[str, Any], where: Path) -> int:
    """Tokens that positions are made for: with YaRN the original length, stretched by its factor,
    whatever ``max_position_embeddings`` says. In these places transformers looks for the two; vLLM
    derives the same. Of linear scaling files do not say whether theirs is the stretched length."""
    most = _number(config, "max_position_embeddings", where)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    # Gemma 3's is always the stretched one.
    if scaling_kind(rope) != "yarn" or architecture(config) == "Gemma3ForCausalLM":
        return most
    name = "original_max_position_embeddings"
    said = next((at for at in (config, rope) if at.get(name) is not None), {name: most})
    original = _number(said, name, where)
    factor = rope.get("factor")
    if factor is None:
        return most  # it is what makes this of the original
    if not isinstance(factor, int | float) or isinstance(factor, bool) or factor <= 0:
        raise CheckpointError(f"config.json of {where} needs a positive number as factor")
    return int(original * factor)


def _eos(directory: Path, config: dict[str, Any]) -> tuple[int, ...]:
    value = read_generation_config(directory).get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise CheckpointError(f"eos_token_id of {directory} is neither a number nor a list of them")
    return tuple(ids)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); download it again") from error


def _number(config: dict[str, Any], name: str, where: Path) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise CheckpointError(f"config.json of {where} needs a positive number as {name}")
    return value


# --- Which model families work, and why the others do not. No torch: the CLI asks before loading.
# A family is listed only if the tests of this repository run it (tests/backend/test_families.py).
# The stage code is the same for all of them.

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


# --- Whether two checkpoints mean the same by a token id. JSON only, no torch.


def check_vocab(target: Path, draft: Path) -> None:
    """Raise ``CheckpointError`` where the draft's tokenizer maps tokens to other ids than the
    target's. Normalisation and chat templates may differ: only ids cross between the models."""
    ours, theirs = token_ids(target), token_ids(draft)
    if ours == theirs:
        return
    different = sorted(ours.items() ^ theirs.items(), key=lambda item: (item[1], item[0]))
    raise CheckpointError(
        f"tokenizer mismatch: {draft} and {target} disagree on {len(different)} entries of their "
        f"vocabularies, the first being {different[0][0]!r}; use a draft model of the same family"
    )


def token_ids(directory: Path) -> dict[str, int]:
    """Every token of a checkpoint's ``tokenizer.json`` and its id, added tokens included."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(
            f"{directory} has no tokenizer.json; save its tokenizer in the fast format"
        )
    try:
        content = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        vocab = content["model"]["vocab"]
        if isinstance(vocab, list):  # Unigram: (token, score) in order of id
            ids = {entry[0]: i for i, entry in enumerate(vocab)}
        else:
            ids = dict(vocab)
        ids |= {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
    except (OSError, msgspec.MsgspecError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"{file} is not a tokenizer this program can read") from error
    return ids
