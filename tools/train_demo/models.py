"""The bundled target, its tokenizer, and its draft model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tools.train_demo.corpus import Corpus

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|endoftext|>"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2

VOCAB = 1024
"""Short tokens are easier to guess, for drafts too, and cost less in every softmax."""

POSITIONS = 2048

_SAMPLE_CHARACTERS = {"story": 6_000_000, "math": 2_000_000, "code": 3_000_000}
"""Merges settle long before this; books alone would crowd out the other kinds."""

SIZES: dict[str, dict[str, int]] = {
    "demo-target": {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    # Two layers, because copying (induction) needs two.
    "demo-draft": {
        "hidden_size": 160,
        "intermediate_size": 432,
        "num_hidden_layers": 2,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
    },
}


def train_tokenizer(corpus: Corpus) -> Tokenizer:
    """Byte-level BPE with single digits; encoding puts BOS in front."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = ["\n".join(corpus[kind])[:size] for kind, size in _SAMPLE_CHARACTERS.items()]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def build(name: str, seed: int) -> Any:
    """A ``LlamaForCausalLM`` with random weights and tied embeddings."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        **SIZES[name],
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        rms_norm_eps=1e-5,
    )
    return LlamaForCausalLM(config)


def save(model: Any, tokenizer: Tokenizer, folder: Path, shards: int) -> None:
    """A checkpoint in float16, its weights in about ``shards`` files."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    model.half().save_pretrained(
        folder, max_shard_size=int(2.2 * model.num_parameters() / shards) + 1
    )
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)
    wrapped: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    wrapped.save_pretrained(folder)
    # Newer transformers write a class name that older programs do not know.
    path = folder / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2) + "\n")
