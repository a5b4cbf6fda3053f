"""Saving a training half way and taking it up again, or going on from it with other texts."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from asyncspec.core.errors import UserError, writing

State = dict[str, torch.Tensor]


@dataclass
class Position:
    """How far a training has come, over all its runs."""

    step: int = 0
    # Steps of trainings before it, from whose weights it began.
    earlier: int = 0
    seconds: float = 0.0
    finished: bool = False
    # Figures of the best weights, which may be those that it began with.
    agreement: tuple[float, ...] = ()
    leading: float = -1.0
    # The best measurement since it began, and how many have been no better since.
    reached: float = -1.0
    stale: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """A training's file."""

    path: Path
    # Names all that the training depends on, and what its weights fit.
    fingerprint: str
    fits: str
    # Tokens that the head proposes, and which of its matrices have a row for each of them.
    ids: torch.Tensor
    by_proposed: tuple[str, ...]

    def save(
        self,
        position: Position,
        head: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        best: State,
    ) -> None:
        """Write everything, by rename, so that an interrupted save harms nothing."""
        content = {
            "fingerprint": self.fingerprint,
            "fits": self.fits,
            "ids": self.ids,
            "position": asdict(position),
            "head": head.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "best": best,
        }
        unfinished = self.path.with_suffix(".tmp")
        with writing(str(self.path)):
            torch.save(content, unfinished)
            os.replace(unfinished, self.path)

    def load(
        self, head: nn.Module, optimizers: list[torch.optim.Optimizer]
    ) -> tuple[Position, State]:
        """Restore in place: the position, and the best weights so far. A new position where there
        is no file, and where it is of a training with other texts or settings: then the weights
        are the best of that one. Raises ``UserError`` where they do not fit."""
        if not self.path.exists():
            return Position(), {}
        content: dict[str, Any] = torch.load(self.path, weights_only=True, map_location="cpu")
        if content.get("fits") != self.fits:
            raise UserError(
                f"{self.path} is a head of another kind or target; remove it, or give another --out"
            )
        if content["fingerprint"] != self.fingerprint:
            state = content["best"] or content["head"]
            for name in self.by_proposed:
                state[name] = moved_rows(state[name], content["ids"], self.ids.cpu())
            head.load_state_dict(state)
            ended = Position(**content["position"])
            return Position(earlier=ended.earlier + ended.step), {}
        head.load_state_dict(content["head"])
        for optimizer, saved in zip(optimizers, content["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return Position(**content["position"]), content["best"]


def moved_rows(rows: torch.Tensor, tokens: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows of ``tokens`` as rows of tokens ``ids``."""
    by_token = rows.new_zeros(int(max(tokens.max(), ids.max())) + 1, *rows.shape[1:])
    by_token[tokens] = rows
    return by_token[ids]
