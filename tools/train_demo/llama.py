"""The two Llama models: the target with its loss, and the draft model's shell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from .tokenizer import BOS_ID, EOS_ID, PAD_ID

if TYPE_CHECKING:
    from .recipe import Shape


def build_llama(shape: Shape, vocab: int, max_positions: int, seed: int) -> Any:
    """A fresh `LlamaForCausalLM` with tied embeddings, the same for the same seed."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        rms_norm_eps=1e-5,
    )
    return LlamaForCausalLM(config)


def next_token_loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy (nats) of every token of `rows` [rows, context] but the first."""
    logits: torch.Tensor = model(input_ids=rows, use_cache=False).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten())


def parameter_count(model: nn.Module) -> int:
    """Parameters, tied ones once."""
    return sum(p.numel() for p in model.parameters())
