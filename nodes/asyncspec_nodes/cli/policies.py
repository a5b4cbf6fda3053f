"""``asyncspec policies``: what there is, and the settings of each."""

from __future__ import annotations

import argparse
import sys

from asyncspec.policy.base import Policy
from asyncspec.policy.registry import POLICIES, parameters
from asyncspec_nodes.console.arguments import Parser


def add_arguments(parser: Parser) -> None:
    """The arguments of ``asyncspec policies``: none."""


def run(arguments: argparse.Namespace) -> int:
    """The whole command."""
    width = max(map(len, POLICIES))
    for name, policy in POLICIES.items():
        sys.stdout.write(f"{name:{width}}  {_first_line(policy)}{_warning(policy)}\n")
        if settings := parameters(policy):
            written = ",".join(f"{key}={value}" for key, value in settings.items())
            sys.stdout.write(f"{'':{width}}  {name}:{written}\n")
    return 0


def _first_line(policy: Policy) -> str:
    return (sys.modules[type(policy).__module__].__doc__ or "").strip().splitlines()[0].rstrip(".")


def _warning(policy: Policy) -> str:
    return "; lossy: not what the target alone would write" if policy.top_logprobs else ""
