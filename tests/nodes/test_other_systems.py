"""Commands on systems that lack what Linux has. ``make test-portable`` runs more of them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tools.portable.__main__ import elsewhere, environment, missing

COMMAND = (sys.executable, "-P", "-m", "asyncspec_nodes.cli.main")
TOY = ("--target", "toy:layers=4,vocab=64", "--draft", "twin", "--stages", "2")

WINDOWS = """
import sys

for name in ("fcntl", "resource", "termios", "pwd", "uvloop"):
    sys.modules[name] = None
sys.platform = "win32"
from asyncspec_nodes.cli.main import main
sys.exit(main(["run", "hello"]))
"""


def test_windows_is_told_of_wsl() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", WINDOWS], capture_output=True, text=True)
    line = "asyncspec: asyncspec runs on Linux and macOS; on Windows, use it in WSL 2\n"
    assert (done.returncode, done.stderr) == (2, line)


@pytest.fixture
def apart() -> None:
    if why := missing():
        pytest.skip(why)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("apart")
def test_the_text_without_proc_uvloop_and_fork_is_the_same(tmp_path: Path) -> None:
    words = (*COMMAND, "run", *TOY, "--json", "--prompt", "1 2", "--max-new-tokens", "24")
    here = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=True)
    there = subprocess.run(
        elsewhere(words), capture_output=True, text=True, cwd=tmp_path, env=environment()
    )
    assert there.returncode == 0, there.stderr
    assert json.loads(there.stdout)["text"] == json.loads(here.stdout)["text"]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("apart")
def test_a_service_there_answers_and_an_interrupt_ends_it(tmp_path: Path) -> None:
    words = elsewhere((*COMMAND, "serve", *TOY, "--port", "0"))
    serving = subprocess.Popen(
        words, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment()
    )
    assert serving.stderr is not None
    with serving.stderr:
        try:
            url = next(line.split()[-1] for line in serving.stderr if line.startswith("serving"))
            body = {"model": TOY[1], "prompt": "1 2", "max_tokens": 4}
            request = urllib.request.Request(
                f"{url}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=240) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 4
            serving.send_signal(signal.SIGINT)
            assert serving.wait(240) in (0, 1)
        finally:
            serving.kill()
            serving.wait()
