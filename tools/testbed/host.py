"""Running the commands of a plan on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

from asyncspec.core.errors import ClusterError


def execute(command: Sequence[str]) -> str:
    """Run a command to its end: its output. Raises ``ClusterError`` with what it complained of.

    It has a session of its own, so Ctrl-C does not stop it half-way.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, start_new_session=True
        )
    except OSError as error:
        raise ClusterError(f"cannot run {command[0]}: {error.strerror}") from None
    if done.returncode:
        text = " ".join(done.stderr.split()) or f"code {done.returncode}"
        raise ClusterError(f"{' '.join(command)}: {text}")
    return done.stdout


def lacking() -> str | None:
    """What keeps namespaces from working here, as far as can be said without a trial."""
    if os.geteuid() != 0:
        return "namespaces, links and cgroups need root"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"the program {program} is missing (package iproute2)"
    return None
