"""``asyncspec up`` and ``join`` as users type them, on three machines of a network: namespaces."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from asyncspec_nodes.join.token import read

NAMES = [f"as{os.getpid()}{letter}" for letter in "abc"]
BRIDGE = f"br{os.getpid()}"
COMMAND = (sys.executable, "-P", "-m", "asyncspec_nodes.cli.main")
SECONDS = 60.0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def inside(name: str, *words: str) -> list[str]:
    return ["ip", "netns", "exec", name, *words]


@pytest.fixture
def network() -> Iterator[None]:
    """A bridge with a namespace for each machine; addresses 10.79.0.1 to 3."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the ip command")
    try:
        ip("link", "add", BRIDGE, "type", "bridge")
    except subprocess.CalledProcessError:
        pytest.skip("network namespaces are not allowed here")
    try:
        ip("link", "set", BRIDGE, "up")
        for number, name in enumerate(NAMES, start=1):
            ip("netns", "add", name)
            ip("link", "add", f"v{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"v{name}", "master", BRIDGE, "up")
            ip("-n", name, "addr", "add", f"10.79.0.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            # Multicast goes where the default route does.
            ip("-n", name, "route", "add", "default", "dev", "eth0")
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True)


def wait_for(log: Path, text: str) -> str:
    """The line with a text, once it is there."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        found = [line for line in log.read_text().splitlines() if text in line]
        if found:
            return found[-1]
        time.sleep(0.1)
    raise AssertionError(f"{text!r} does not come: {log.read_text()}")


def ask(name: str) -> str:
    """An answer over HTTP, from inside a namespace."""
    body = json.dumps({"model": "toy", "prompt": "Once", "max_tokens": 24, "temperature": 0})
    address = "http://127.0.0.1:8000/v1/completions"
    words = ["curl", "-s", "-m", "60", "-H", "content-type: application/json", "-d", body, address]
    out = subprocess.run(inside(name, *words), check=True, capture_output=True).stdout
    text: str = json.loads(out)["choices"][0]["text"]
    return text


@pytest.mark.processes
def test_three_machines_without_a_file(network: None, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("the answers are asked for with curl")
    running: list[subprocess.Popen[bytes]] = []

    def start(name: str, *words: str) -> Path:
        log = tmp_path / f"{name}-{len(running)}.log"
        with log.open("wb") as out:
            argv = inside(name, *COMMAND, *words)
            running.append(subprocess.Popen(argv, stdout=out, stderr=out))
        return log

    try:
        small = ("--memory-gib", "1", "--gb-per-second", "1")
        up = ("up", "--target", "toy:layers=6", "--model-name", "toy", "--machines", "3", *small)
        log = start(NAMES[0], *up, "--name", "one")
        made = wait_for(log, "asyncspec join").split()[-1]
        # The first finds the cluster at the token's address, the second by mDNS.
        start(NAMES[1], "join", made, "--name", "two", *small)
        moved = replace(read(made), hosts=("127.0.0.1",), port=1)
        start(NAMES[2], "join", str(moved), "--name", "three", *small)
        wait_for(log, "serving toy")
        first = ask(NAMES[0])
        assert len(first) == 24
        running[1].kill()
        assert ask(NAMES[0]) == first
        assert "two" in wait_for(log, "is gone for")
    finally:
        for one in reversed(running):
            one.terminate()
        for one in running:
            one.wait(30)
