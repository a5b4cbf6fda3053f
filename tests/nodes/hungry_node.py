"""A node that takes memory by the row:
``python hungry_node.py GROUP BYTES [python ...] ARGUMENTS``.

GROUP is the ``cgroup.procs`` of the control group that it joins; every row of a pass costs so many
BYTES until its session is released.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

from msgspec.structs import replace

import asyncspec_nodes.node.process as process
from asyncspec.core.jobs import Batch, Forward, Release
from asyncspec_nodes.node import cli
from asyncspec_nodes.node.loading import Loaded, load_node


def main() -> None:
    """The process."""
    group, size = Path(sys.argv[1]), int(sys.argv[2])
    arguments = sys.argv[sys.argv.index(cli.__name__) + 1 :]
    group.write_text(str(os.getpid()))
    held: defaultdict[int, list[bytes]] = defaultdict(list)

    def load(*what: Any) -> Loaded:
        loaded = load_node(*what)

        def run_job(job: Any) -> object | None:
            if isinstance(job, Release):
                held.pop(job.session, None)
            passes = job.passes if isinstance(job, Batch) else (job,)
            for one in passes:
                if isinstance(one, Forward):
                    held[one.session].append(b"\1" * (size * one.row_count))
            return loaded.run_job(job)

        return replace(loaded, run_job=run_job)

    with mock.patch.object(process, "load_node", load):
        cli.entry(arguments)


if __name__ == "__main__":
    main()
