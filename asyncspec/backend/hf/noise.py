"""Made-up numbers for trying out what was loaded."""

from __future__ import annotations

import torch


def noise(*size: int, seed: int = 0) -> torch.Tensor:
    """Standard normal numbers that leave the process's generator alone."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def noise_tokens(count: int, vocab: int) -> torch.Tensor:
    """Token ids [count]."""
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(7))
