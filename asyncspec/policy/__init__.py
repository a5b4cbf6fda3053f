"""Policies by name: one small pure module each, all on the same machines."""

from __future__ import annotations

from asyncspec.policy.autoregressive import Autoregressive
from asyncspec.policy.base import Growth, Policy, View
from asyncspec.policy.chunked import Chunked
from asyncspec.policy.flowspec import FlowSpec

POLICIES: dict[str, Policy] = {
    "autoregressive": Autoregressive(),
    "chunked": Chunked(),
    "pruned": Chunked(early=True),
    "flowspec-no-sbd": FlowSpec(sbd=False),
    "flowspec": FlowSpec(),
}

__all__ = ["POLICIES", "Growth", "Policy", "View"]
