"""Saving a training half way and taking it up again."""

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
    seconds: float = 0.0
    finished: bool = False
    # Figures of the best measurement, and how many have been no better since.
    agreement: tuple[float, ...] = ()
    leading: float = -1.0
    stale: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """A training's file; ``fingerprint`` names the settings it was made with."""

    path: Path
    fingerprint: str

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
        """Restore in place: the position, and the best weights so far; a new position where there
        is no file. Raises ``UserError`` where it belongs to another training."""
        if not self.path.exists():
            return Position(), {}
        content: dict[str, Any] = torch.load(self.path, weights_only=True, map_location="cpu")
        if content["fingerprint"] != self.fingerprint:
            raise UserError(
                f"{self.path} comes from a training with other settings; remove it, or give "
                "another --out"
            )
        head.load_state_dict(content["head"])
        for optimizer, saved in zip(optimizers, content["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return Position(**content["position"]), content["best"]
