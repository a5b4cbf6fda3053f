"""Ctrl-C while a command still imports: one line at most, and no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.node import listen

# Runs a module as ``python -m`` does, and interrupts itself where a certain one is looked for.
INTERRUPTED = """
import os, runpy, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == wanted:
            sys.stderr.write(f"importing {name}\\n")
            os.kill(os.getpid(), signal.SIGINT)

# Ignored where the tests run in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)
_, wanted, module, *words = sys.argv
sys.argv = [module, *words]
sys.meta_path.insert(0, Interrupts())
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def interrupted(wanted: str, *argv: str, descriptor: int | None = None) -> tuple[int, str]:
    """Exit code, and what is said after the import of ``wanted`` has begun."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, wanted, *argv],
        capture_output=True,
        text=True,
        timeout=240,
        pass_fds=() if descriptor is None else (descriptor,),
    )
    before, found, after = done.stderr.partition(f"importing {wanted}\n")
    assert (before, done.stdout) == ("", "")
    assert found
    return done.returncode, after


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("--help", "argparse"),
        ("policies", "asyncspec.policy"),
        ("memory", "asyncspec_nodes.cluster.config"),
        pytest.param("memory", "torch", marks=pytest.mark.torch),
        ("run", "asyncspec_nodes.client.client"),
        ("serve", "aiohttp"),
        ("simulate", "asyncspec_nodes.plugins.simulation.cluster"),
        ("plan dipsd --preset paper", "numpy"),
        ("record trace", "asyncio"),
        ("trace trace", "msgspec"),
    ],
)
def test_a_command(command: str, wanted: str) -> None:
    argv = [*command.split(), *(["--target", str(BUNDLED_TARGET)] if command == "memory" else [])]
    said = interrupted(wanted, "asyncspec_nodes.cli.main", *argv)
    assert said == (1, "asyncspec: interrupted\n")


@pytest.mark.parametrize(
    "wanted", ["asyncspec_nodes.cluster.config", "asyncspec_nodes.node.process"]
)
def test_a_node(wanted: str, tmp_path: Path) -> None:
    """A signal is how it is stopped, then as later."""
    file = tmp_path / "cluster.toml"
    node = '[[node]]\nrank = {}\nhost = "127.0.0.1"\nport = 770{}\n'
    nodes = "".join(node.format(rank, rank) for rank in range(2))
    file.write_text(f'[target]\npath = "{BUNDLED_TARGET}"\n{nodes}')
    with listen.loopback() as sock:
        argv = ["--role", "verify", "--rank", "1", "--config", str(file)]
        argv += ["--listen-fd", str(sock.fileno())]
        module = "asyncspec_nodes.node.cli"
        assert interrupted(wanted, module, *argv, descriptor=sock.fileno()) == (0, "")


def test_help_imports_next_to_nothing() -> None:
    code = (
        "import sys\n"
        "from asyncspec_nodes.cli.main import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "finally:\n"
        "    print(*sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0
    assert "run prompts on a cluster of processes here" in done.stdout
    imported = set(done.stderr.split())
    assert "asyncspec_nodes.cli.main" in imported
    # Commands are found by entry points, so ``importlib.metadata`` is needed.
    heavy = {"asyncio", "msgspec", "numpy", "rich", "aiohttp", "torch"}
    assert not heavy & imported
