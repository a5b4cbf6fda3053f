"""Run in a process of its own: loads one draft and prints the most memory it took, in bytes."""

from __future__ import annotations

import torch

from asyncspec.backend.base import Quantize
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec.plugins.hf.heads.draft_model import load_draft
from asyncspec_protocol.ids import SessionId, Version
from asyncspec_protocol.messages import Expand
from backend.memory_child import MIB, peak


def main(path: str, tokens: int, quantize: Quantize) -> int:
    """A prompt of so many tokens, and a tree."""
    torch.set_num_threads(1)
    draft = load_draft(open_checkpoint(path), quantize=quantize)
    prompt = tuple(token % 1000 for token in range(tokens))
    draft.run(
        Expand(
            session=SessionId(1),
            version=Version(0),
            base=0,
            committed=prompt,
            depth=6,
            width=10,
            count=64,
        )
    )
    return int(peak() * MIB)
