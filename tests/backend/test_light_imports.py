"""What a node of a checkpoint imports until it computes."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]

NODE = """
import sys
from asyncspec.backend.base import StageOptions, StageSpec
from asyncspec.backend.registry import backend_of
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET

model = str(BUNDLED_TARGET)
backend = backend_of(model)
backend.preload(model)
backend.load(StageSpec(backend.open(model), (0, 4), StageOptions()))
loaded = [name for name in ("torch._dynamo", "torch.distributed.tensor") if name in sys.modules]
assert not loaded, loaded

import torch
from transformers import masking_utils

assert torch.distributed.is_available()
with masking_utils.TransformGetItemToIndex():
    pass
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2
"""


def test_a_node_imports_no_compiler_before_it_is_used() -> None:
    done = subprocess.run([sys.executable, "-c", NODE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
