"""Checkpoints of random weights, for what depends on shapes alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def save_random(config: Any, folder: Path, dtype: torch.dtype) -> Path:
    """A causal LM of transformers' ``config`` in ``folder``, the same whenever it is made."""
    import torch
    from transformers import AutoModelForCausalLM

    from asyncspec.plugins.hf.kernels.process import quiet_transformers

    quiet_transformers()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.to(dtype).save_pretrained(folder)
    return folder
