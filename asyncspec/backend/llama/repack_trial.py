"""Whether a stage works with repacked weights: a child process loads it and computes its self-test,
because llama.cpp ends the process where its kernels for this CPU fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from asyncspec.backend.base import EngineOptions

_SECONDS = 600.0
"""For reading the weights once more, and some passes."""


def repacking_works(path: Path, first: int, last: int, options: EngineOptions) -> bool:
    """Of layers [first, last) of the model in ``path``."""
    arguments = (str(path), str(first), str(last), msgspec.json.encode(options).decode())
    command = [sys.executable, "-P", "-m", __name__, *arguments]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def main(path: str, first: str, last: str, options: str) -> None:
    """The child."""
    from asyncspec.backend.llama.stage import load_engine
    from asyncspec.backend.llama.target import open_target

    how = msgspec.json.decode(options, type=EngineOptions)
    load_engine(open_target(Path(path)), int(first), int(last), "exact", how, repack=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
