"""What is first tried in a child process, because llama.cpp ends the process where an assertion of
its code fails: a file whose metadata contradict each other, and repacked weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from asyncspec.backend.base import EngineOptions, Mode
from asyncspec.backend.kept_results import KeptResults
from asyncspec.core.errors import CheckpointError
from asyncspec.plugins.llama.cut import cut
from asyncspec.plugins.llama.devices import find
from asyncspec.plugins.llama.target import OpenTarget

_CHILD = "asyncspec.plugins.llama.trial_child"

_SECONDS = 600.0
"""For reading the weights once more, and some passes."""


def check_loads(path: Path, first: int, last: int) -> None:
    """Load layers [first, last) without their weights; of none, the vocabulary. Raises
    ``CheckpointError``."""
    code, text = _child(str(path), str(first), str(last))
    if code > 0:
        raise CheckpointError(text or f"{path} cannot be loaded; fetch it again")
    if code < 0:  # a signal; what failed is at the end of the line
        why = text.rpartition(": ")[2] or f"signal {-code}"
        raise CheckpointError(f"{path}: llama.cpp cannot load this model ({why}); fetch it again")


def ensure_loads(target: OpenTarget, first: int, last: int, results: KeptResults) -> None:
    """``check_loads``, unless ``results`` has that it succeeds."""

    def check() -> bool:
        check_loads(target.path, first, last)
        return True

    depends = {"model": target.fingerprint, "layers": (first, last)}
    results.get("llama loads", depends, bool, check)


_NOT_REPACKED = frozenset({"F32", "F16", "BF16"})

_repacked: dict[object, bool] = {}
"""What was found, by all it depends on."""


def repacks(target: OpenTarget, span: tuple[int, int], mode: Mode, options: EngineOptions) -> bool:
    """Whether a child can compute with the last of the layers ``span`` repacked, in exact mode with
    equal bits; not where a GPU computes."""
    if options.repack == "off" or find(options.device) is not None:
        return False
    last = (span[1] - 1, span[1])
    try:
        tensors = [*cut(target.model, *last)[1].values()]
    except CheckpointError:  # a family that cannot be cut so
        last, tensors = span, [*target.model.tensors.values()]
    shapes = frozenset((tensor.type, tensor.shape) for tensor in tensors if tensor.file)
    if _NOT_REPACKED.issuperset(kind for kind, _ in shapes):
        return False
    key = (target.model.architecture, shapes, mode, options)
    if key not in _repacked:
        how = msgspec.json.encode(options).decode()
        _repacked[key] = _child(str(target.path), *map(str, last), mode, how)[0] == 0
    return _repacked[key]


def _child(*arguments: str) -> tuple[int, str]:
    """Its exit code, and the last line that it prints on stderr."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", _CHILD, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            # No debugger for the stack. What is tried on the CPU needs no GPU, whose driver takes
            # memory and time to start.
            env=os.environ
            | dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "")
            | {"GGML_NO_BACKTRACE": "1"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, (done.stderr.strip().splitlines() or [""])[-1]
