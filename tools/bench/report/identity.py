"""What a result was measured with: code, machine, versions."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[3]
MEASURED = ("asyncspec", "protocol/asyncspec_protocol", "nodes/asyncspec_nodes")
MEASURING = (
    "tools/bench/processes.py",
    *(f"tools/bench/report/{name}.py" for name in ("real", "target", "text_stage", "virtual")),
)
"""Where the code lies that results depend on: packages, and modules of this tool. Its others only
choose what is measured, and a cell says all of that for itself."""


def code_hash() -> str:
    """A hash of the code that measures and is measured. Results of other code are not taken for
    ours, committed or not; a commit of pages alone leaves them valid."""
    paths = [path for folder in MEASURED for path in sorted((ROOT / folder).rglob("*.py"))]
    paths += [ROOT / path for path in MEASURING]
    digest = hashlib.sha256()
    for path in paths:
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def commit() -> str:
    """The checkout's commit; marked where files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "no git checkout"


def machine() -> dict[str, str]:
    """This machine, for the reader of a report."""
    return {
        "cpu": _cpu(),
        "cores": str(os.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")
