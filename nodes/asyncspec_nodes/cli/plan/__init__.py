"""``asyncspec plan``: who is verified together when many users draft for one target."""

from asyncspec_nodes.cli.plan.command import run
from asyncspec_nodes.cli.plan.options import add_arguments

__all__ = ["add_arguments", "run"]
