"""A byte-level BPE tokenizer with single digits."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from pathlib import Path

    from .data import Document, Split

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|endoftext|>"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2

# Merges settle long before this; books alone would crowd out the other kinds.
_SAMPLE_CHARS = {"story": 6_000_000, "math": 2_000_000, "code": 3_000_000}


def train_tokenizer(splits: dict[str, Split], vocab: int, seed: int) -> Tokenizer:
    """Learn `vocab` tokens from the training documents; encoding puts BOS in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [t for kind, split in splits.items() for t in _sample(kind, split.train, seed)]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json for `AutoTokenizer`."""
    folder.mkdir(parents=True, exist_ok=True)
    wrapped: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    wrapped.save_pretrained(folder)
    # Newer transformers write a class name that older programs do not know.
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n")


def _sample(kind: str, documents: list[Document], seed: int) -> list[str]:
    room = _SAMPLE_CHARS[kind]
    shuffled = random.Random(f"{seed} {kind}").sample(documents, len(documents))
    texts: list[str] = []
    for document in shuffled:
        if room <= 0:
            break
        texts.append(document.text[:room])
        room -= len(document.text)
    return texts
