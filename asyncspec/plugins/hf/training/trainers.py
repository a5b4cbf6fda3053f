"""The kinds of heads that can be trained, as their registry has them."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import nn

from asyncspec.backend.base import ModelInfo
from asyncspec.backend.feature_shards import Notes, Shards, read_notes
from asyncspec.backend.trainers import Progress, Trained, Training
from asyncspec.core.errors import UserError
from asyncspec.plugins.hf.heads.eagle.head import target_matrix
from asyncspec.plugins.hf.kernels.device import find
from asyncspec.plugins.hf.training.batches import Texts
from asyncspec.plugins.hf.training.checkpoint import Checkpoint
from asyncspec.plugins.hf.training.dflash_head import DFlashHead
from asyncspec.plugins.hf.training.eagle3_head import Eagle3Head
from asyncspec.plugins.hf.training.files import HeadFiles, Kind
from asyncspec.plugins.hf.training.layers import HeadShape, shape_for
from asyncspec.plugins.hf.training.lesson import (
    Examination,
    Matrices,
    centre,
    products_type,
    proposed_ids,
)
from asyncspec.plugins.hf.training.loop import Schedule, train

EXAMINED = 16
"""Windows of held-out texts that a measurement reads."""

SAMPLED = 8
"""Batches that tell the scales of what a head reads."""


class HeadTrainer:
    """What all kinds have in common. ``levels``: tokens that a head proposes in a row."""

    kind: Kind
    levels: int
    layers: int
    # Matrices with a row for each token that a head proposes, which begin as zeros.
    by_proposed: tuple[str, ...] = ()

    def depths(self, layers: int) -> tuple[int, ...]:
        """A low, a middle and a high one, as EAGLE-3 reads them; fewer of small targets. Not 1
        first, by which readers tell another way of counting."""
        low = min(2, layers)
        high = layers - 3 if layers > 6 else layers - 1
        return tuple(sorted({max(low, depth) for depth in (low, layers // 2, high)}))

    def train(self, training: Training, report: Callable[[Progress], None]) -> Trained:
        """See ``asyncspec.backend.trainers.Trainer``."""
        info, notes = training.target.info, read_notes(training.shards)
        shards = Shards(training.shards, notes)
        lengths = self.levels + 2, training.window
        texts = Texts(shards, lengths, held_out=False)
        held_out = Texts(shards, lengths, held_out=True)
        try:
            shape = shape_for(info.hidden_size, self.layers)
        except ValueError as error:
            raise UserError(f"{training.name}: there is no head for {error}") from None
        counts = torch.from_numpy(texts.counts(info.vocab_size))
        matrices = self._matrices(training, counts)
        device = matrices.output.device
        torch.manual_seed(training.seed)
        width = len(notes.depths) * info.hidden_size
        # The last of those that occur least.
        mask = int((counts == counts.min()).nonzero()[-1])
        head = self.new_head(shape, width, info, len(matrices.ids), mask)
        centre(head, (texts.batch(training.seed + 1, i) for i in range(SAMPLED)))
        head.to(device)
        schedule = Schedule(
            texts,
            Examination((batch.to(device) for batch in held_out.sweep(EXAMINED)), matrices),
            matrices,
            training.seed,
            training.epochs,
            training.minutes,
        )
        checkpoint = Checkpoint(
            training.shards.parent / f"{self.kind}.pt",
            _fingerprint(training, notes),
            _digest([self.kind, notes, [*head.state_dict()]]),
            matrices.ids.cpu(),
            self.by_proposed,
        )
        position, best = train(head, schedule, checkpoint, report)
        steps = position.earlier + position.step
        trained = Trained(steps, position.agreement, position.leading)
        HeadFiles(
            kind=self.kind,
            shape=shape,
            depths=notes.depths,
            levels=self.levels,
            settings=self.settings(head, notes.depths),
            weights=best,
            ids=matrices.ids,
            output=matrices.proposed,
        ).write(training, trained)
        return trained

    def _matrices(self, training: Training, counts: torch.Tensor) -> Matrices:
        device = find(training.device).torch
        dtype, vocab = products_type(device), len(counts)
        embedding, output = (
            target_matrix(training.target, which, dtype, "a head shares with it").to(device, dtype)
            for which in ("embedding", "head")
        )
        ids = proposed_ids(counts, min(training.draft_vocab or vocab, vocab)).to(device)
        proposed = output if len(ids) == vocab else output[ids]
        return Matrices(embedding, output, ids, proposed)

    @abstractmethod
    def new_head(
        self, shape: HeadShape, width: int, info: ModelInfo, proposed: int, mask: int
    ) -> nn.Module:
        """A head with random weights. ``width``: columns of a feature row; ``proposed``: tokens
        that it can propose; ``mask``: a token that hardly occurs."""

    @abstractmethod
    def settings(self, head: Any, depths: tuple[int, ...]) -> dict[str, Any]:
        """What the configuration says of this kind alone."""


class Eagle3Trainer(HeadTrainer):
    """EAGLE-3, with training-time test."""

    kind = "eagle3"
    levels = 5
    layers = 1

    def new_head(
        self, shape: HeadShape, width: int, info: ModelInfo, proposed: int, mask: int
    ) -> nn.Module:
        return Eagle3Head(shape, width, self.levels)

    def settings(self, head: Any, depths: tuple[int, ...]) -> dict[str, Any]:
        return {
            "eagle_aux_hidden_state_layer_ids": [*depths],
            "norm_before_residual": False,
            "norm_before_fc": False,
            "embed_requires_grad": False,
        }


class DFlashTrainer(HeadTrainer):
    """DFlash with DSpark's Markov head, in blocks."""

    kind = "dspark"
    levels = 8
    layers = 2
    markov_rank = 64
    by_proposed = ("markov_head.markov_w2.weight",)

    def new_head(
        self, shape: HeadShape, width: int, info: ModelInfo, proposed: int, mask: int
    ) -> nn.Module:
        vocab = info.vocab_size, proposed
        return DFlashHead(
            *(shape, width, self.levels),
            vocab=vocab,
            mask_token=mask,
            markov_rank=self.markov_rank,
        )

    def settings(self, head: Any, depths: tuple[int, ...]) -> dict[str, Any]:
        return {
            "aux_hidden_state_layer_ids": [*depths],
            "block_size": self.levels,
            "sample_from_anchor": True,
            "mask_token_id": head.mask_token,
            "markov_head_type": "vanilla",
            "markov_rank": self.markov_rank,
            "enable_confidence_head": False,
        }


def _fingerprint(training: Training, notes: Notes) -> str:
    """Names all that the weights depend on."""
    settings = (
        *(training.draft_vocab, training.epochs, training.minutes, training.seed),
        training.window,
    )
    return _digest([notes, settings, [path.name for path in Shards(training.shards, notes).shards]])


def _digest(content: object) -> str:
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:16]


EAGLE3 = Eagle3Trainer()
DFLASH = DFlashTrainer()
