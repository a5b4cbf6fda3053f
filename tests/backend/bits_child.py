"""Run in a process of its own: stages with so many threads, on kernels of the environment's choice.

Arguments: a checkpoint, the number of threads, and the type.
"""

from __future__ import annotations

import sys

from asyncspec.backend.threads import set_thread_count

set_thread_count(int(sys.argv[2]))

import torch  # noqa: E402

from asyncspec.backend.hf.checkpoint import open_checkpoint  # noqa: E402
from backend.probe import (  # noqa: E402
    cut,
    same_bits,
)

if __name__ == "__main__":
    assert torch.get_num_threads() == int(sys.argv[2])
    stages = cut(open_checkpoint(sys.argv[1]), 2, dtype=sys.argv[3])
    same_bits(stages, "a child", widest=40)
    sys.stdout.write(stages[0].shard.describe())
