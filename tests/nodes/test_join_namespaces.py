"""``asyncspec up`` and ``join`` as users type them, on three machines of a network: namespaces."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from asyncspec_nodes.plugins.join.token import read

pytestmark = pytest.mark.slow

NAT = """
table ip nat {
  chain in {
    type nat hook prerouting priority -100;
    iifname "eth0" ip protocol tcp dnat to 10.80.0.2:tcp dport map { 7800: 7700, 7801: 7701 };
  }
  chain out { type nat hook postrouting priority 100; oifname "eth0" masquerade; }
}
"""
COMMAND = (sys.executable, "-P", "-m", "asyncspec_nodes.cli.main")
SECONDS = 200.0
"""On shared cores; a hang, not slowness."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def inside(name: str, *words: str) -> list[str]:
    return ["ip", "netns", "exec", name, *words]


def netns(name: str, address: str, *link: str) -> None:
    """A namespace with one device, eth0; ``link``: its other end is so."""
    ip("netns", "add", name)
    ip("link", "add", f"v{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
    ip("link", "set", f"v{name}", *link)
    ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
    ip("-n", name, "link", "set", "eth0", "up")
    ip("-n", name, "link", "set", "lo", "up")


@pytest.fixture
def names() -> Iterator[Sequence[str]]:
    """A bridge with a namespace for each machine, addresses 10.79.0.1 to 3, the third of them a
    router's; behind it is the third machine, 10.80.0.2, whose ports are others outside.
    The namespaces' names, which no other process of the tests has."""
    if os.geteuid() or shutil.which("ip") is None or shutil.which("nft") is None:
        pytest.skip("network namespaces need root and the commands ip and nft")
    bridge, router, *machines = [f"as{os.getpid()}{letter}" for letter in "brxyz"]
    try:
        ip("link", "add", bridge, "type", "bridge")
    except subprocess.CalledProcessError:
        pytest.skip("network namespaces are not allowed here")
    try:
        ip("link", "set", bridge, "up")
        for number, name in enumerate((*machines[:2], router), start=1):
            netns(name, f"10.79.0.{number}", "master", bridge, "up")
            # Multicast goes where the default route does.
            ip("-n", name, "route", "add", "default", "dev", "eth0")
        netns(machines[2], "10.80.0.2", "netns", router)
        ip("-n", router, "addr", "add", "10.80.0.1/24", "dev", f"v{machines[2]}")
        ip("-n", router, "link", "set", f"v{machines[2]}", "up")
        ip("-n", machines[2], "route", "add", "default", "via", "10.80.0.1")
        rules = inside(router, "sh", "-c", "sysctl -qw net.ipv4.ip_forward=1 && nft -f -")
        try:
            subprocess.run(rules, input=NAT, text=True, check=True, capture_output=True)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no address translation here: {error.stderr}")
        yield machines
    finally:
        for name in (*machines, router):
            # Else its end here would go some time after the namespace.
            subprocess.run(["ip", "link", "del", f"v{name}"], capture_output=True)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


@pytest.fixture
def lan() -> Iterator[Sequence[str]]:
    """Three machines on a bridge, 10.79.0.1 to 3: the names of their namespaces."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip")
    bridge, *machines = [f"as{os.getpid()}{letter}" for letter in "cuvw"]
    try:
        ip("link", "add", bridge, "type", "bridge")
    except subprocess.CalledProcessError:
        pytest.skip("network namespaces are not allowed here")
    try:
        ip("link", "set", bridge, "up")
        for number, name in enumerate(machines, start=1):
            netns(name, f"10.79.0.{number}", "master", bridge, "up")
        yield machines
    finally:
        for name in machines:
            subprocess.run(["ip", "link", "del", f"v{name}"], capture_output=True)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


class Start:
    """Starts commands in namespaces; each returns its log."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.running: list[subprocess.Popen[bytes]] = []

    def __call__(self, name: str, *words: str) -> Path:
        log = self._folder / f"{name}-{len(self.running)}.log"
        with log.open("wb") as out:
            argv = inside(name, *COMMAND, *words)
            self.running.append(subprocess.Popen(argv, stdout=out, stderr=out))
        return log


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """All are ended with the test."""
    if shutil.which("curl") is None:
        pytest.skip("the answers are asked for with curl")
    start = Start(tmp_path)
    yield start
    for one in reversed(start.running):
        one.terminate()
    for one in start.running:
        one.wait(240)


def attempts() -> Iterator[None]:
    """Ten a second, for so long as may be."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        yield
        time.sleep(0.1)


def wait_for(log: Path, text: str, times: int = 1) -> str:
    """The line with a text, once it is there so often."""
    for _ in attempts():
        found = [line for line in log.read_text().splitlines() if text in line]
        if len(found) >= times:
            return found[-1]
    raise AssertionError(f"{text!r} does not come: {log.read_text()}")


def wait_for_link(name: str, host: str) -> None:
    """Until a machine has a connection to another one."""
    words = inside(name, "ss", "-Htn", "state", "established", "dst", host)
    for _ in attempts():
        if subprocess.run(words, check=True, capture_output=True).stdout:
            return
    raise AssertionError(f"no link to {host}")


def answer(name: str, count: int = 24, **more: bool) -> subprocess.Popen[bytes]:
    """Asks over HTTP, from inside a namespace; writes what comes."""
    asked = {"model": "toy", "prompt": "Once", "max_tokens": count, "temperature": 0, **more}
    words = ["curl", "-sNm", str(SECONDS), "-H", "content-type: application/json"]
    words += ["-d", json.dumps(asked), "http://127.0.0.1:8000/v1/completions"]
    return subprocess.Popen(inside(name, *words), stdout=subprocess.PIPE)


def ask(name: str, count: int = 24) -> str:
    """The text of so many tokens."""
    with answer(name, count) as asked:
        assert asked.stdout is not None
        text: str = json.load(asked.stdout)["choices"][0]["text"]
    return text


@pytest.mark.processes
def test_three_machines_without_a_file(names: Sequence[str], start: Start, tmp_path: Path) -> None:
    small = ("--memory-gib", "1", "--gb-per-second", "1")
    up = ["up", "--target", "toy:layers=6", "--model-name", "toy", "--machines", "3", *small]
    up += ["--name", "one", "--token-file", str(tmp_path / "up.json")]
    log = start(names[0], *up)
    made = wait_for(log, "asyncspec join").split()[-1]
    # The second finds the cluster by mDNS.
    moved = replace(read(made), hosts=("127.0.0.1",), port=1)
    two = start(names[1], "join", str(moved), "--name", "two", *small)
    outside = ("--listen", "0.0.0.0:7700", "--advertise", "10.79.0.3:7800")
    three = start(names[2], "join", made, "--name", "three", *outside, *small)
    wait_for(log, "serving toy")
    assert {one.split()[-1] for one in log.read_text().splitlines() if "layers" in one} == {
        "(here)",
        "two",
        "three",
    }
    first = ask(names[0])
    assert len(first) == 24
    # Members join it again when it is started anew.
    start.running[0].kill()
    start.running[0].wait()
    log = start(names[0], *up)
    assert wait_for(log, "asyncspec join").split()[-1] == made
    wait_for(log, "serving toy")
    assert ask(names[0]) == first
    for other in (two, three):
        wait_for(other, "serves", times=2)
    start.running[1].kill()
    assert ask(names[0]) == first
    assert "two" in wait_for(log, "is gone: ")


@pytest.mark.processes
def test_machines_that_come_later_and_a_power_cut(
    lan: Sequence[str], start: Start, tmp_path: Path
) -> None:
    """Layers are placed anew for a machine that joins later; then all are killed, and started in
    another order."""
    # So slow that two machines promise more than one.
    small = ("--memory-gib", "1", "--gb-per-second", ".001")
    up = ["up", "--target", "toy:layers=6", "--model-name", "toy", *small]
    up += ["--name", "one", "--token-file", str(tmp_path / "up.json")]
    log = start(lan[0], *up)
    made = wait_for(log, "asyncspec join").split()[-1]
    wait_for(log, "starts alone in 10 s")
    wait_for(log, "serving toy")
    first = ask(lan[0])
    join = ["join", made, "--name", "two", *small]
    two = start(lan[1], *join)
    wait_for(two, "a spare")
    assert "2 machines about" in wait_for(log, "plans anew")
    wait_for(two, "serves")
    wait_for(log, "all stages serve")
    assert ask(lan[0]) == first
    for one in start.running:
        one.kill()
        one.wait()
    two = start(lan[1], *join)
    wait_for(two, "trying again until")
    log = start(lan[0], *up)
    wait_for(log, "serving toy")
    # It has not waited for anybody else, and nothing had to move.
    wait_for(two, "serves")
    assert "starts with 2" not in log.read_text()
    assert ask(lan[0]) == first


@pytest.mark.processes
def test_two_machines_that_do_not_reach_each_other(
    lan: Sequence[str], start: Start, tmp_path: Path
) -> None:
    """Their link is carried by the first one, which holds no stage, until they do again."""

    def neighbours(*words: str) -> None:
        """What the two take each other for."""
        for name, host in ((lan[1], "10.79.0.3"), (lan[2], "10.79.0.2")):
            ip("-n", name, "neigh", *words[:1], host, *words[1:], "dev", "eth0")

    small = ("--memory-gib", "1", "--gb-per-second", "1")
    up = ["up", "--target", "toy:layers=6", "--model-name", "toy", "--machines", "2"]
    up += ["--name", "one", "--token-file", str(tmp_path / "up.json"), "--no-stage"]
    log = start(lan[0], *up)
    made = wait_for(log, "asyncspec join").split()[-1]
    for name, called in ((lan[1], "two"), (lan[2], "three")):
        start(name, "join", made, "--name", called, *small)
    wait_for(log, "serving toy")
    first = ask(lan[0], 400)
    with answer(lan[0], 400, stream=True) as asked:
        assert asked.stdout is not None
        lines = [asked.stdout.readline()]
        # Nothing comes through from one to the other, and no sender learns of it.
        neighbours("replace", "lladdr", "02:00:00:00:00:99", "nud", "permanent")
        lines += [line for line in asked.stdout if line.startswith(b"data: {")]
    pieces = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == first
    carried = wait_for(log, "carried over this machine")
    assert "(two)" in carried
    assert "(three)" in carried
    assert "check that machine's firewall" not in log.read_text()
    neighbours("del")
    assert "reaches stage 2" in wait_for(log, " again")
    wait_for_link(lan[1], "10.79.0.3")
    assert ask(lan[0], 400) == first
