"""One client's checks against a running service."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tools.clients.catalogue import PROGRAMS, Capability, Check, Client
from tools.clients.dictation import FILE, NEW, OLD, QUESTION, TASK, TEXT
from tools.clients.environments import commands_of, folder_of, node_of, path

SECONDS = 600
"""A command's time: on a busy machine an agent's prompt alone takes a minute."""


def check_all(client: Client, root: Path, url: str, edited: Path) -> Mapping[Capability, str]:
    """Run every check: for each of its capabilities "" or what was wrong. What the commands wrote
    lies in the client's folder. ``edited``: the folder of the file that is edited."""
    found: dict[Capability, str] = {}
    for check in client.checks:
        problem = _problem(client, check, root, url, edited)
        found |= dict.fromkeys(check.capabilities, problem)
    return found


def _problem(client: Client, check: Check, root: Path, url: str, edited: Path) -> str:
    folder, commands = folder_of(client, root), commands_of(client, root)
    values = {
        "bin": str(commands),
        "python": str(commands / "python"),
        "node": str(node_of(root) / "node"),
        "programs": str(PROGRAMS),
        "folder": str(folder),
        "target": str(root / "target"),
        "url": url,
        "task": TASK,
        "question": QUESTION,
    }
    file, home = edited / FILE, folder / "home"
    file.write_text(f"{TEXT.format(OLD)}\n")
    home.mkdir(exist_ok=True)
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    outside = {name: value for name, value in path(root).items() if name not in hidden}

    def filled(text: str) -> str:
        for name, value in values.items():
            text = text.replace(f"{{{name}}}", value)
        return text

    environ = {name: filled(text) for name, text in client.environ.items()}
    log = folder / f"{'-'.join(check.capabilities)}.txt"
    with log.open("w") as output:
        try:
            code = subprocess.run(
                list(map(filled, check.command)),
                cwd=edited,
                env={**outside, "HOME": str(home), **environ},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=SECONDS,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return f"no end within {SECONDS} s; {log}"
        except OSError as error:
            return f"{os.strerror(error.errno or 0)}: {check.command[0]}"
    if code:
        return f"exit code {code}; {log}"
    if check.says not in log.read_text(errors="replace"):
        return f"{check.says!r} is not in its output; {log}"
    if "edit" in check.capabilities and file.read_text() != f"{TEXT.format(NEW)}\n":
        return f"the file is not edited; {log}"
    return ""
