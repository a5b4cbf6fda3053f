"""A node whose device hangs once: ``python hanging_node.py MARK NUMBER [python ...] ARGUMENTS``.

MARK is a file that is made when the ``NUMBER``-th job begins to hang; where it is, no job hangs.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

from msgspec.structs import replace

import asyncspec_nodes.node.process as process
from asyncspec_nodes.node import cli
from asyncspec_nodes.node.loading import Loaded, load_node


def main() -> None:
    """The process."""
    mark, left = Path(sys.argv[1]), int(sys.argv[2])
    arguments = sys.argv[sys.argv.index(cli.__name__) + 1 :]

    def load(*what: Any) -> Loaded:
        loaded = load_node(*what)

        def run_job(job: Any) -> object | None:
            nonlocal left
            left -= 1
            if left == 0 and not mark.exists():
                mark.touch()
                threading.Event().wait()
            return loaded.run_job(job)

        return replace(loaded, run_job=run_job)

    with mock.patch.object(process, "load_node", load):
        cli.entry(arguments)


if __name__ == "__main__":
    main()
