"""Policies by name: one small pure module each, all on the same machines."""

from __future__ import annotations

from asyncspec.policy.autoregressive import Autoregressive
from asyncspec.policy.base import Growth, Policy, View
from asyncspec.policy.chain import Chain
from asyncspec.policy.chunked import Chunked
from asyncspec.policy.flowspec import FlowSpec
from asyncspec.policy.level_tree import Levels
from asyncspec.policy.linear import Linear
from asyncspec.policy.registry import Catalogue
from asyncspec.policy.static_tree import StaticTree

POLICIES = Catalogue(
    {
        "autoregressive": Autoregressive(),
        "chain": Chain(),
        "chain-streamed": Chain(k=1),
        "static-tree": StaticTree(),
        "chunked": Chunked(),
        "pruned": Chunked(early=True),
        "pipedec": Levels(width=32, children=16),
        "specpipe": Levels(width=64, children=8),
        "flowspec-no-sbd": FlowSpec(sbd=False),
        "flowspec": FlowSpec(),
        "dip-sd": Linear(),
        "lossy-relaxed": Levels(width=64, children=8, lossy="relaxed"),
        "lossy-top-p": Levels(width=64, children=8, lossy="top-p"),
    }
)

LOSSLESS = tuple(name for name, policy in POLICIES.items() if not policy.top_logprobs)
"""Names of the policies that write what the target alone would have written."""

__all__ = ["LOSSLESS", "POLICIES", "Growth", "Policy", "View"]
