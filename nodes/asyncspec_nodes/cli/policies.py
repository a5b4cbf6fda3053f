"""``asyncspec policies``: the policies, and the parameters of each."""

from __future__ import annotations

import argparse
import sys

from asyncspec.policy.registry import POLICIES, parameters
from asyncspec_nodes.console.arguments import Parser


def add_arguments(parser: Parser) -> None:
    """None."""


def run(arguments: argparse.Namespace) -> int:
    width = max(map(len, POLICIES))
    for name, policy in POLICIES.items():
        module = sys.modules[type(policy).__module__]
        first_line = (module.__doc__ or "").strip().splitlines()[0].rstrip(".")
        lossy = "; lossy: not what the target alone would write" if policy.top_logprobs else ""
        sys.stdout.write(f"{name:{width}}  {first_line}{lossy}\n")
        if settings := parameters(policy):
            written = ",".join(f"{key}={value}" for key, value in settings.items())
            sys.stdout.write(f"{'':{width}}  {name}:{written}\n")
    return 0
