"""Writing the models in the formats that others load."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from .prepare import Prepared
from .tokenizer import save_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from .dflash import DFlashHead
    from .eagle import EagleHead
    from .options import Options


def export(options: Options, target: Any, draft: Any, head: EagleHead) -> None:
    """Write demo-target, demo-draft and demo-eagle below `options.out`, in float16."""
    tokenizer = Tokenizer.from_file(str(Prepared(options.work).tokenizer))
    for model, name, shards in ((target, "demo-target", 2), (draft, "demo-draft", 1)):
        save_llama(model, options.out / name, shards)
        save_tokenizer(tokenizer, options.out / name, options.recipe.max_positions)
    save_head(head, target.config, options.out / "demo-eagle")


def save_llama(model: Any, folder: Path, shards: int) -> None:
    """A Hugging Face model folder, its weights in about `shards` safetensors files."""
    _empty(folder)
    total = sum(2 * p.numel() for p in model.parameters())
    # Shards are filled greedily, so a little slack keeps the count.
    limit = int(total / shards * 1.1) + 1
    half = type(model)(model.config).to(torch.float16)
    half.load_state_dict(model.state_dict())
    half.config.dtype = torch.float16
    half.save_pretrained(folder, max_shard_size=limit)
    _readable(folder)


def save_head(head: EagleHead, target: Any, folder: Path) -> None:
    """An EAGLE-1/2 checkpoint: the published key names, float16."""
    _empty(folder)
    tensors = {k: v.to("cpu", torch.float16).contiguous() for k, v in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bias": True,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": target.eos_token_id,
        "pad_token_id": target.pad_token_id,
        "hidden_act": "silu",
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "max_position_embeddings": target.max_position_embeddings,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "num_hidden_layers": 1,
        "pretraining_tp": 1,
        "qkv_bias": False,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": target.rope_parameters["rope_theta"],
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vocab_size": target.vocab_size,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _readable(folder)


def save_blocks(head: DFlashHead, target: Any, folder: Path) -> None:
    """A DSpark checkpoint in speculators' layout, float16; embedding and output matrix are the
    target's own."""
    _empty(folder)
    tensors = {k: v.to("cpu", torch.float16).contiguous() for k, v in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    shape, block = head.size.shape, head.size.block
    layers = {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "head_dim": shape.hidden // shape.heads,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "num_hidden_layers": shape.layers,
        "layer_types": ["full_attention"] * shape.layers,
        "max_position_embeddings": target.max_position_embeddings,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": head.size.rope_theta},
        "vocab_size": target.vocab_size,
    }
    verifier = {"name_or_path": "demo-target", "architectures": [*target.architectures]}
    config = {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "aux_hidden_state_layer_ids": [*block.depths],
        "block_size": block.rows,
        "sample_from_anchor": True,
        "mask_token_id": head.size.mask_token,
        "markov_head_type": "vanilla",
        "markov_rank": block.markov_rank,
        "enable_confidence_head": False,
        "draft_vocab_size": target.vocab_size,
        "transformer_layer_config": layers,
        "speculators_config": {"algorithm": "dspark", "verifier": verifier},
        "dtype": "float16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _readable(folder)


def _readable(folder: Path) -> None:
    """Safetensors files are made for the owner alone; these are to be shipped."""
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)


def _empty(folder: Path) -> None:
    """Old shards would be left beside new ones under other names."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in ("*.safetensors", "*.json", "*.jinja"):
        for path in folder.glob(pattern):
            path.unlink()
