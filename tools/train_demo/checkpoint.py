"""Saving a stage half way and taking it up again."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from .errors import UserError

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class Progress:
    """How far a stage has come: steps, tokens over all workers, seconds over all runs."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    finished: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """One stage's file; `fingerprint` names the settings it was made with."""

    path: Path
    fingerprint: str

    def save(
        self, progress: Progress, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]
    ) -> None:
        """Write everything, by rename, so that an interrupted save harms nothing."""
        state = {
            "fingerprint": self.fingerprint,
            "progress": asdict(progress),
            "model": model.state_dict(),
            "optimizers": [o.state_dict() for o in optimizers],
        }
        draft = self.path.with_suffix(".tmp")
        torch.save(state, draft)
        os.replace(draft, self.path)

    def load(self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> Progress:
        """Restore in place; a fresh `Progress` when there is no file."""
        if not self.path.exists():
            return Progress()
        state: dict[str, Any] = torch.load(self.path, weights_only=True, map_location="cpu")
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return Progress(**state["progress"])

    def check(self) -> None:
        """Raise `UserError` if the file belongs to another run."""
        if not self.path.exists():
            return
        state = torch.load(self.path, weights_only=True, map_location="cpu", mmap=True)
        if state["fingerprint"] != self.fingerprint:
            raise UserError(
                f"{self.path} comes from other settings: remove it, or give --fresh or --work"
            )
