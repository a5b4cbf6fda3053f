"""A stage with random weights: long contexts, and trees of any size below them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from asyncspec.core.jobs import Admit, Forward, Row
from asyncspec.core.sampling import Sampling
from asyncspec_protocol.ids import SegmentId, SessionId
from tools.bench.growth import trees
from tools.bench.growth.timing import Call
from tools.bench.random_model import save_random

if TYPE_CHECKING:
    from asyncspec.backend.base import Mode

SESSION = SessionId(0)
HIDDEN, FEED_FORWARD, LAYERS, HEADS, KV_HEADS, VOCAB = 256, 768, 4, 8, 4, 512
MODES: tuple[Mode, ...] = ("exact", "fast")


def make_checkpoint(folder: Path, positions: int) -> Path:
    """Write a Llama of random weights, in float32, into ``folder``."""
    import torch
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=VOCAB,
        max_position_embeddings=positions,
    )
    return save_random(config, folder, torch.float32)


class Stage:
    """All layers of a checkpoint, with one session."""

    def __init__(self, folder: Path, mode: Mode, capacity: int) -> None:
        from asyncspec.backend.hf.checkpoint import open_checkpoint
        from asyncspec.backend.hf.stage import load_stage

        self._stage = load_stage(open_checkpoint(str(folder)), 0, LAYERS, dtype="fp32", mode=mode)
        self._stage.run(Admit(SESSION, capacity, Sampling()))
        self.committed = 0

    def prefill(self, until: int, chunk: int) -> None:
        """Process a prompt up to so many tokens."""
        for start in range(self.committed, until, chunk):
            end = min(start + chunk, until)
            rows = tuple(Row(i, i, tuple(range(start, i + 1))) for i in range(start, end))
            self._stage.run(_forward(start, rows))
        self.committed = until

    def grow(self, live: int, chunk: int) -> None:
        """Put so many nodes of a binary tree below the prompt."""
        for start in range(0, live, chunk):
            self._pass(range(start, min(start + chunk, live)))()

    def one_pass(self, live: int, count: int) -> Call:
        """A pass of so many further nodes, with ``live`` in the speculative region before them. It
        can be run again and again: it writes the same slots."""
        return self._pass(range(live, live + count))

    def _pass(self, nodes: range) -> Call:
        job = _forward(self.committed, trees.rows(self.committed, nodes))
        return lambda: self._stage.run(job)


def _forward(committed: int, rows: tuple[Row, ...]) -> Forward:
    tokens = tuple(3 + row.slot % (VOCAB - 3) for row in rows)
    return Forward(SESSION, SegmentId(0), committed, rows, tokens=tokens)
