"""Modules on the meta device are made without drawing weights that are nowhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from asyncspec.plugins.hf.checkpoint.placeholders import NoRandomWeights

pytestmark = pytest.mark.torch


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.uniform_, torch.ops.aten.normal_)
        return func(*args, **(kwargs or {}))


def modules() -> list[nn.Module]:
    return [nn.Linear(3, 4), nn.Embedding(5, 3), nn.Conv1d(2, 2, 1)]


def test_nothing_is_drawn_for_tensors_that_hold_nothing() -> None:
    with NoRandomWeights(), torch.device("meta"), Draws() as draws:
        made = modules()
    assert draws.count == 0
    assert all(x.is_meta for one in made for x in one.parameters())


def test_others_are_drawn_as_ever() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        want = modules()
        torch.manual_seed(3)
        with NoRandomWeights():
            got = modules()
    for one, other in zip(want, got, strict=True):
        assert all(
            torch.equal(x, y) for x, y in zip(one.parameters(), other.parameters(), strict=True)
        )
