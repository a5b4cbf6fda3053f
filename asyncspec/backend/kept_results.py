"""What self-tests and trials of a start showed, kept for the next one.

A result holds for one processor, one build of the libraries that compute, one version of this
program and one environment, and for what it depends on besides: the model, its layers, the mode. It
is a file in the user's cache folder whose name is a digest of all that. A file that cannot be read
or written costs a new test, and a line of the log.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import msgspec

import asyncspec

RETEST = "ASYNCSPEC_RETEST"
"""The variable of the environment that ``--retest`` sets: no kept result is read."""

HELP = "test kernels anew at the start, in place of kept results"
"""The help of that option."""

MAX_FILES = 1000
"""Results that are kept; those of the least recent tests go first."""

_PROCESSOR = frozenset(
    {
        *("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags"),
        *("CPU implementer", "CPU part", "CPU variant", "CPU revision", "Features"),
    }
)
"""Lines of ``/proc/cpuinfo`` that describe a kind of processor."""

_VARIABLES = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "ONEDNN_", "DNNL_", "OPENBLAS_", "BLIS_", "ATEN_"),
    *("TORCH_", "PYTORCH_", "ORT_", "GGML_", "CUDA_", "HIP_", "NVIDIA_TF32"),
)
"""How the names of variables begin that may change what a library computes with."""

_LIBRARIES = ("lib", "capi")
"""Folders of a package with its shared objects."""

T = TypeVar("T")


class KeptResults:
    """Results of tests whose bits or times depend on the packages ``builds``. ``folder``: where
    they are kept; None: nowhere, each test is done."""

    def __init__(self, folder: Path | None = None, builds: Sequence[str] = ()) -> None:
        self._folder = folder
        self._builds = tuple(builds)

    def get(
        self,
        test: str,
        depends: Mapping[str, object],
        kind: type[T],
        run: Callable[[], T],
        fits: Callable[[T], bool] = lambda result: True,
    ) -> T:
        """The kept result of a ``test``, of type ``kind``, where it ``fits``; else what ``run``
        returns, which is kept. ``depends``: what it depends on, as JSON. What ``run`` raises is
        not kept."""
        if self._folder is None:
            return run()
        facts = {**surroundings(self._builds), "test": test, **depends}
        digest = hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()
        file = self._folder / f"{digest}.json"
        if not os.environ.get(RETEST):
            kept = _read(file, kind)
            if kept is not None and fits(kept):
                return kept
        result = run()
        _write(file, {"facts": facts, "result": result})
        return result


NOT_KEPT = KeptResults()
"""Each test is done."""


def kept_by_user(builds: Sequence[str]) -> KeptResults:
    """Those in the user's cache folder."""
    folder = user_folder("self-tests")
    return NOT_KEPT if folder is None else KeptResults(folder, builds)


def user_folder(name: str) -> Path | None:
    """A folder in the user's cache folder; None where there is no home."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    with suppress(RuntimeError):
        return Path(root).expanduser() / "asyncspec" / name
    return None


def surroundings(builds: Sequence[str]) -> Mapping[str, object]:
    """What every result depends on."""
    variables = {k: v for k, v in os.environ.items() if k.startswith(_VARIABLES)}
    return {**_fixed(tuple(builds)), "environment": variables}


def retest() -> None:
    """Have this process and its children do each test anew."""
    os.environ[RETEST] = "1"


@cache
def _fixed(builds: Sequence[str]) -> Mapping[str, object]:
    """That part of it which a process cannot change."""
    return {
        "processor": _processor(),
        "python": sys.version,
        "program": _digest(_sources(Path(asyncspec.__file__).parent)),
        "builds": {name: _digest(_build(name)) for name in builds},
    }


def _processor() -> str:
    """The kind of this machine's processor."""
    lines: list[str] = []
    with suppress(OSError), Path("/proc/cpuinfo").open() as stream:
        for line in stream:
            if not line.strip():
                break  # the first of several
            if line.partition(":")[0].strip() in _PROCESSOR:
                lines.append(line)
    return "".join(lines) or f"{platform.machine()} {platform.processor()}"


def _sources(folder: Path) -> Iterator[Path]:
    return folder.rglob("*.py")


def _build(package: str) -> Iterator[Path]:
    """The files by which a build of a package differs from another one."""
    spec = find_spec(package)
    for folder in map(Path, (spec and spec.submodule_search_locations) or ()):
        yield folder / "__init__.py"
        yield folder / "version.py"
        for name in _LIBRARIES:
            yield from (folder / name).glob("*.so*")
            yield from (folder / name).glob("*.dylib")
            yield from (folder / name).glob("*.dll")


def _digest(files: Iterator[Path]) -> str:
    """A digest of paths, sizes and times of change; nothing is read."""
    digest = hashlib.sha256()
    for file in sorted(files):
        with suppress(OSError):
            status = file.stat()
            digest.update(f"{file} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _read(file: Path, kind: type[T]) -> T | None:
    """None where there is no result, or the file holds none."""
    try:
        entry: Any = msgspec.json.decode(file.read_bytes())
        result: T = msgspec.convert(entry["result"], kind)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _warn("%s holds no result of a self-test (%s); it is done anew", file, error)
        return None
    with suppress(OSError):
        os.utime(file)
    return result


def _write(file: Path, entry: Mapping[str, object]) -> None:
    """Replaces the file at once: nodes that start side by side write the same ones."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(msgspec.json.encode(entry))
        os.replace(name, file)
        _forget(file.parent)
    except OSError as error:
        _warn("results of self-tests are not kept in %s (%s)", file.parent, error.strerror)


def _forget(folder: Path) -> None:
    """Remove what is more than ``MAX_FILES``."""
    files = [*folder.iterdir()]
    if len(files) <= MAX_FILES:
        return
    times = {}
    for file in files:
        with suppress(OSError):  # another node has removed it
            times[file] = file.stat().st_mtime_ns
    for file in sorted(times, key=times.__getitem__)[:-MAX_FILES]:
        with suppress(OSError):
            file.unlink()


def _warn(text: str, *details: object) -> None:
    logging.getLogger(__name__).warning(text, *details)
