"""Which operation of onnxruntime's a family's activation function is: found by trying."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from msgspec import Struct

from asyncspec.backend.hf.graph import CONTRIB, Graph, GraphError
from asyncspec.backend.hf.noise import noise

_X = "x"
_COUNT = 4096
_CLOSE = 3e-6
"""Of the largest number. The two kinds of GELU are a hundred times as far apart."""


class Activation(Struct, frozen=True):
    """An operator."""

    operator: str
    attributes: Mapping[str, Any]

    def added(self, graph: Graph, x: str) -> str:
        """Its result in a graph."""
        return graph.add(self.operator, x, domain=CONTRIB, **self.attributes)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Its result. Raises ``GraphError``."""
        graph = Graph()
        run = graph.made([self.added(graph, _X)], [_X])
        return torch.from_numpy(run({_X: x.numpy()})[0])


_KNOWN = (
    Activation("QuickGelu", {"alpha": 1.0}),  # SiLU, by another name
    Activation("FastGelu", {}),
    Activation("Gelu", {}),
)


def known_activation(function: Callable[[torch.Tensor], torch.Tensor]) -> Activation | None:
    """The operator that does what ``function`` does, if there is one."""
    x = noise(1, _COUNT)
    want = function(x.clone())
    for activation in _KNOWN:
        try:
            got = activation.of(x)
        except GraphError:
            continue
        if close(got, want, _CLOSE):
            return activation
    return None


def close(got: torch.Tensor, want: torch.Tensor, share: float) -> bool:
    """Whether no number differs by more than a share of the largest."""
    return bool((got - want).abs().max() <= share * want.abs().max())
