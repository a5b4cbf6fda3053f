"""A random target of two layers whose tokenizer is the demo models'."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def save_small_target(path: Path, *, shards: str = "1GB", **changes: Any) -> Path:
    """Write the checkpoint. ``changes``: to the model's configuration; ``shards``: the largest size
    of a file of weights."""
    given = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.2,
    }
    config = transformers.LlamaConfig(**{**given, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(path, max_shard_size=shards)
    for name in TOKENIZER:
        shutil.copy(BUNDLED_TARGET / name, path)
    return path
