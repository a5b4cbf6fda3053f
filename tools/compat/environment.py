"""A new virtual environment with the project's wheel in it."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import msgspec
from packaging.version import Version

from asyncspec.core.errors import ClusterError

_WAIT = 1800
"""Seconds a command may take: pip may have to download gigabytes."""


class Failure(ClusterError):
    """A command ended with an error; the text has its last lines."""


class Environment:
    """A virtual environment in a folder that does not exist yet."""

    def __init__(self, folder: Path, python: str | None = None) -> None:
        """``python``: the interpreter; default: the running one. Raises ``Failure``."""
        # pip is the caller's: a copy for each environment takes seconds.
        if python is None:
            venv.create(folder, with_pip=False, symlinks=True)
        else:
            run([python, "-m", "venv", "--without-pip", str(folder)], folder.parent)
        self.folder = folder
        self._bin = folder / "bin"
        (self._packages,) = (folder / "lib").glob("python*/site-packages")

    def link_torch(self, version: str) -> bool:
        """Link the caller's torch into this environment where it has that version, which takes no
        time and no disk, where an installation takes a minute and a gigabyte. Another version
        of Python needs a torch of its own."""
        if self._packages.parent.name != f"python{sys.version_info[0]}.{sys.version_info[1]}":
            return False
        try:
            found = distribution("torch")
        except PackageNotFoundError:
            return False
        if Version(found.version).public != Version(version).public:
            return False
        for name in {file.parts[0] for file in found.files or () if file.parts[0] != ".."}:
            (self._packages / name).symlink_to(Path(str(found.locate_file(name))))
        return True

    def install(self, wheel: str, others: Sequence[str], constraints: Sequence[str]) -> None:
        """``others`` are requirements. Raises ``Failure``."""
        file = self.folder / "constraints.txt"
        file.write_text("".join(f"{line}\n" for line in constraints))
        pip = [sys.executable, "-m", "pip", "--python", str(self._bin / "python")]
        # Python compiles what is imported; all of it takes longer than the rest of this.
        options = ["install", "--no-compile", "--constraint", str(file)]
        run([*pip, *options, wheel, *others], self.folder)

    def run(self, command: str, *words: str) -> str:
        """The output of a command of this environment, which sees nothing of the checkout. Raises
        ``Failure``."""
        hidden = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
        outside = {name: value for name, value in os.environ.items() if name not in hidden}
        return run([str(self._bin / command), *words], self.folder, outside)

    def versions(self) -> Mapping[str, str]:
        """Of everything that is installed, by name."""
        code = (
            "import importlib.metadata as m, json;"
            "print(json.dumps({d.name.lower(): d.version for d in m.distributions()}))"
        )
        return msgspec.json.decode(self.run("python", "-c", code), type=dict[str, str])


def build_wheel(project: Path, folder: Path) -> Path:
    """The wheel of a checkout, in ``folder``. Raises ``Failure``."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    run([*pip, "--wheel-dir", str(folder), str(project)], folder)
    (wheel,) = folder.glob("asyncspec-*.whl")
    return wheel


def run(command: Sequence[str], folder: Path, environ: Mapping[str, str] | None = None) -> str:
    """What a command writes on stdout and stderr. Raises ``Failure``."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=_WAIT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Failure(f"{' '.join(command)} took more than {_WAIT} s") from error
    if done.returncode:
        last = "\n".join(done.stdout.splitlines()[-40:])
        raise Failure(f"{' '.join(command)} ended with exit code {done.returncode}:\n{last}")
    return done.stdout
