"""Published models' layers: which kernels a CPU takes is a matter of their shapes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from tools.bench.random_model import save_random

if TYPE_CHECKING:
    import torch

VOCAB = 512
"""Of the random models, where a published one's would be most of the work."""

POSITIONS = 1024


class Shape(Struct, frozen=True):
    """Of a layer; what else its family asks for is in ``special``."""

    family: str
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    # 0: what the hidden size leaves for each head.
    head_dim: int = 0
    special: dict[str, Any] = {}

    def save(self, folder: Path, layers: int, dtype: torch.dtype) -> Path:
        """A checkpoint of so many such layers, with random weights."""
        from transformers import AutoConfig

        width = {"head_dim": self.head_dim} if self.head_dim else {}
        config = AutoConfig.for_model(
            self.family,
            hidden_size=self.hidden,
            intermediate_size=self.feed_forward,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            num_hidden_layers=layers,
            vocab_size=VOCAB,
            max_position_embeddings=POSITIONS,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            tie_word_embeddings=False,
            **width,
            **self.special,
        )
        return save_random(config, folder, dtype)


def _experts(**counts: int) -> dict[str, Any]:
    return {"num_experts_per_tok": 2, **counts}


PUBLISHED = {
    "smollm2-135m": Shape("llama", 576, 1536, 9, 3),
    "smollm2-1.7b": Shape("llama", 2048, 8192, 32, 32),
    "tinyllama-1.1b": Shape("llama", 2048, 5632, 32, 4),
    "llama-3.2-1b": Shape("llama", 2048, 8192, 32, 8, 64),
    "llama-3.2-3b": Shape("llama", 3072, 8192, 24, 8, 128),
    "llama-3.1-8b": Shape("llama", 4096, 14336, 32, 8, 128),
    "llama-2-7b": Shape("llama", 4096, 11008, 32, 32),
    "mistral-7b": Shape("mistral", 4096, 14336, 32, 8, 128, {"sliding_window": None}),
    "qwen2.5-0.5b": Shape("qwen2", 896, 4864, 14, 2),
    "qwen2.5-1.5b": Shape("qwen2", 1536, 8960, 12, 2),
    "qwen2.5-7b": Shape("qwen2", 3584, 18944, 28, 4),
    "qwen3-0.6b": Shape("qwen3", 1024, 3072, 16, 8, 128),
    "qwen3-4b": Shape("qwen3", 2560, 9728, 32, 8, 128),
    "gemma-7b": Shape("gemma", 3072, 24576, 16, 16, 256),
    "gemma-2-2b": Shape("gemma2", 2304, 9216, 8, 4, 256),
    "gemma-3-1b": Shape("gemma3_text", 1152, 6912, 4, 1, 256),
    "phi-3-mini": Shape("phi3", 3072, 8192, 32, 32),
    "granite-3-2b": Shape("granite", 2048, 8192, 32, 8),
    "olmo-2-1b": Shape("olmo2", 2048, 8192, 16, 16),
    "smollm3-3b": Shape("smollm3", 2048, 11008, 16, 4),
    "olmoe-1b-7b": Shape("olmoe", 2048, 1024, 16, 16, 0, _experts(num_experts=8)),
    "qwen3-30b-a3b": Shape(
        "qwen3_moe", 2048, 6144, 32, 4, 128, _experts(num_experts=8, moe_intermediate_size=768)
    ),
}
"""Mixtures have a few of their experts."""
