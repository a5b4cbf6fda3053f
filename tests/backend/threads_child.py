"""Run in a process of its own: stages whose products are shared by two threads."""

from __future__ import annotations

import sys

from asyncspec.backend.hf.threads import quiet_threads

quiet_threads(2)

import torch  # noqa: E402

from asyncspec.backend.hf.checkpoint import open_checkpoint  # noqa: E402
from backend.probe import cut, same_bits  # noqa: E402

if __name__ == "__main__":
    assert torch.get_num_threads() == 2
    checkpoint = open_checkpoint(sys.argv[1])
    stages = cut(checkpoint, 2, dtype="auto")
    same_bits(stages, "two threads")
    sys.stdout.write(stages[0].shard.weights_in_words())
