"""How often a drafter's best guesses contain the target's choice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from .distil import teach
from .eagle import EagleHead
from .eagle_training import head_guesses

TOPS = (1, 4, 8)


@dataclass(frozen=True)
class Trio:
    """The models as a user loads them, in evaluation mode."""

    target: Any
    draft: Any
    head: EagleHead


@dataclass
class Tally:
    """Counts over positions; `overlap` sums sum_x min(p(x), q(x)) at temperature 1.

    The mean overlap is the chance that speculative sampling keeps one drafted token.
    """

    positions: int = 0
    hits: dict[int, int] = field(default_factory=lambda: dict.fromkeys(TOPS, 0))
    overlap: float = 0.0

    def add(self, wanted: torch.Tensor, given: torch.Tensor) -> None:
        """Count positions given both logits, [positions, vocab]."""
        wanted, given = wanted.float(), given.float()
        choice = wanted.argmax(-1, keepdim=True)
        rank = (given > given.gather(1, choice)).sum(-1)
        for top in TOPS:
            self.hits[top] += int((rank < top).sum())
        shared = torch.minimum(wanted.softmax(-1), given.softmax(-1))
        self.overlap += float(shared.sum())
        self.positions += len(wanted)

    def figures(self) -> dict[str, float]:
        """Fractions, rounded to three places."""
        n = max(self.positions, 1)
        found = {f"top{top}": round(hits / n, 3) for top, hits in self.hits.items()}
        return {**found, "overlap": round(self.overlap / n, 3), "positions": self.positions}


@torch.no_grad()
def agreement(trio: Trio, rows: torch.Tensor, counted: torch.Tensor) -> dict[str, Tally]:
    """Teacher-forced tallies by drafter on `rows` [rows, length].

    `counted` (bool, same shape) marks the positions whose next token is to be guessed; the
    first two of a row never count, so that all drafters are verified on the same positions.
    """
    tallies = {"draft": Tally(), "eagle": Tally(), "eagle_depth_2": Tally()}
    weight = trio.target.lm_head.weight
    for row, mask in zip(torch.split(rows, 4), torch.split(counted[:, 2:], 4), strict=True):
        features, wanted = teach(trio.target, row)
        one, two = head_guesses(trio.head, row, features)
        given = {
            "draft": trio.draft(input_ids=row, use_cache=False).logits[:, 2:],
            "eagle": functional.linear(one[:, 1:], weight),
            "eagle_depth_2": functional.linear(two, weight),
        }
        for name, logits in given.items():
            tallies[name].add(wanted[:, 2:][mask], logits[mask])
    return tallies
