"""Run in a process of its own: stages with so many threads, on kernels of the environment's choice.

Arguments: the number of threads, the type, and checkpoints. It prints how the weights of each are
kept.
"""

from __future__ import annotations

import sys

from asyncspec.backend.threads import set_thread_count

set_thread_count(int(sys.argv[1]))

import torch  # noqa: E402

from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint  # noqa: E402
from backend.probe import (  # noqa: E402
    cut,
    same_bits,
)

if __name__ == "__main__":
    assert torch.get_num_threads() == int(sys.argv[1])
    for path in sys.argv[3:]:
        stages = cut(open_checkpoint(path), 2, dtype=sys.argv[2])
        same_bits(stages, "a child", widest=40)
        sys.stdout.write(f"{stages[0].shard.describe()}\n")
