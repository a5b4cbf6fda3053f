"""What is first tried in a child process, because llama.cpp ends the process where an assertion of
its code fails: a file whose metadata contradict each other, and repacked weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from asyncspec.backend.base import DEFAULT_OPTIONS, EngineOptions
from asyncspec.core.errors import CheckpointError, UserError

_SECONDS = 600.0
"""For reading the weights once more, and some passes."""


def check_loads(path: Path, first: int, last: int) -> None:
    """Load layers [first, last) without their weights; of none, the vocabulary. Raises
    ``CheckpointError``."""
    code, text = _child(path, first, last, DEFAULT_OPTIONS)
    if code > 0:
        raise CheckpointError(text or f"{path} cannot be loaded; fetch it again")
    if code < 0:  # a signal; what failed is at the end of the line
        why = text.rpartition(": ")[2] or f"signal {-code}"
        raise CheckpointError(f"{path}: llama.cpp cannot load this model ({why}); fetch it again")


def repacking_works(path: Path, first: int, last: int, options: EngineOptions) -> bool:
    """Of layers [first, last) of the model in ``path``."""
    return _child(path, first, last, options)[0] == 0


def _child(path: Path, first: int, last: int, options: EngineOptions) -> tuple[int, str]:
    """Its exit code, and the last line that it prints on stderr."""
    arguments = (str(path), str(first), str(last), msgspec.json.encode(options).decode())
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            # No debugger for the stack.
            env=os.environ | {"GGML_NO_BACKTRACE": "1"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, (done.stderr.strip().splitlines() or [""])[-1]


def main(path: str, first: str, last: str, options: str) -> None:
    """The child. Raises ``UserError``."""
    from asyncspec.backend.llama.cut import VirtualFile, cut
    from asyncspec.backend.llama.engine import Engine, Settings
    from asyncspec.backend.llama.library import load_model
    from asyncspec.backend.llama.stage import load_engine
    from asyncspec.backend.llama.target import open_target
    from asyncspec.backend.llama.tokenizer import LlamaTokenizer

    target, span = open_target(Path(path)), (int(first), int(last))
    how = msgspec.json.decode(options, type=EngineOptions)
    if first == last:
        LlamaTokenizer(target)
    elif how.repack:
        load_engine(target, *span, "exact", how, repack=True)
    else:
        Engine(load_model(VirtualFile(*cut(target.model, *span)), path, weights=False), Settings())


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except UserError as error:
        sys.exit(str(error))
