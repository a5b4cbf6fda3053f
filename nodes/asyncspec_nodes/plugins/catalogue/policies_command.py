"""``asyncspec policies``: the policies, and the parameters of each."""

from __future__ import annotations

import argparse
import sys

import msgspec

from asyncspec.policy.base import Policy
from asyncspec.policy.registry import POLICIES, parameters
from asyncspec_nodes.console.arguments import Parser, print_notice


def add_arguments(parser: Parser) -> None:
    """Arguments of ``policies``."""
    parser.add_argument("--json", action="store_true", help="a list of objects")


def run(arguments: argparse.Namespace) -> int:
    policies, problems = POLICIES.usable()
    for problem in problems:
        print_notice(problem)
    if arguments.json:
        listed = [
            {
                "name": name,
                "description": _description(policy),
                "parameters": dict(parameters(policy)),
                "drafts": policy.uses_draft,
                "lossy": bool(policy.top_logprobs),
            }
            for name, policy in policies.items()
        ]
        sys.stdout.write(msgspec.json.encode(listed).decode() + "\n")
        return 0
    width = max(map(len, policies))
    for name, policy in policies.items():
        first_line = _description(policy)
        lossy = "; lossy: not what the target alone would write" if policy.top_logprobs else ""
        sys.stdout.write(f"{name:{width}}  {first_line}{lossy}\n")
        if settings := parameters(policy):
            written = ",".join(f"{key}={value}" for key, value in settings.items())
            sys.stdout.write(f"{'':{width}}  {name}:{written}\n")
    return 0


def _description(policy: Policy) -> str:
    """The first line of its module's docstring; empty where another package's has none."""
    module = sys.modules[type(policy).__module__]
    return (module.__doc__ or "").strip().partition("\n")[0].rstrip(".")
