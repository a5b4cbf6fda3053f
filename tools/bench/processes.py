"""Real processes on this machine, by the command a user would type."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from asyncspec.core.errors import ClusterError, UserError


def run_prompts(options: Sequence[str], prompts: Sequence[str]) -> list[dict[str, Any]]:
    """``asyncspec run`` with these options: one cluster, one prompt after another. Every answer as
    the command prints it, with its ``stats`` (docs/reference/metrics.md).

    Raises ``UserError`` or ``ClusterError`` with what the command said.
    """
    command = [sys.executable, "-m", "asyncspec_nodes.cli.main", "run", "--json"]
    command += [*options, "--prompts", "/dev/stdin"]
    lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    if done.returncode:
        kind = UserError if done.returncode == 2 else ClusterError
        raise kind(done.stderr.strip())
    return [json.loads(line) for line in done.stdout.splitlines()]
