"""Beds on this machine: what holds between their devices, and that nothing is left of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from msgspec.structs import replace

from asyncspec.core.errors import UserError
from tools.testbed import host, state
from tools.testbed.bed import Bed
from tools.testbed.remove import ask_owner
from tools.testbed.tables import Description, DeviceTable, LinkTable

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MAIN = ROOT / "tools" / "testbed" / "__main__.py"
LACKING = host.lacking()
namespaces = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))

LATENCY = 0.01
DESCRIPTION = Description(
    device=(
        DeviceTable(cpu=0.2),
        DeviceTable(mbit=20, cpu=0.1),
        DeviceTable(mbit=100, memory_mib=256),
    ),
    link=(LinkTable(between=(0, 2), latency_ms=1000 * LATENCY),),
)
KINDS = [pytest.param("namespaces", marks=namespaces), "loopback"]

ECHO = """
import socket, sys
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as server:
    print("ready", flush=True)
    while True:
        peer, _ = server.accept()
        with peer:
            while data := peer.recv(1 << 16):
                peer.sendall(data)
"""
PING = """
import json, socket, sys, time
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as peer:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        peer.sendall(b"ping")
        assert peer.recv(100) == b"ping"
        times.append(time.perf_counter() - start)
print(json.dumps(times))
"""
SINK = """
import json, socket, struct, sys, time
size, got = int(sys.argv[3]), 0
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as server:
    print("ready", flush=True)
    peer, _ = server.accept()
    with peer:
        (start,) = struct.unpack("d", peer.recv(8, socket.MSG_WAITALL))
        while got < size:
            got += len(peer.recv(1 << 16))
print(json.dumps(got / (time.monotonic() - start)), flush=True)
"""
POUR = """
import socket, struct, sys, time
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as peer:
    peer.sendall(struct.pack("d", time.monotonic()) + bytes(int(sys.argv[3])))
"""
"""When it begins is the sender's to say: what a late receiver finds has not come in no time."""
SPIN = """
import json, time
before, end = time.process_time(), time.monotonic() + 0.6
while time.monotonic() < end:
    pass
print(json.dumps(time.process_time() - before))
"""


def start(bed: Bed, device: int, code: str, *words: object) -> subprocess.Popen[str]:
    """A Python program on a device."""
    command = [sys.executable, "-c", code, *map(str, words)]
    return bed.start(device, command, stdout=subprocess.PIPE, text=True)


def output(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def result(process: subprocess.Popen[str]) -> object:
    """What it prints, as JSON."""
    with output(process) as out:
        found = json.loads(out.read())
    assert process.wait() == 0
    return found


@contextlib.contextmanager
def serving(bed: Bed, device: int, code: str, *words: object) -> Iterator[subprocess.Popen[str]]:
    """A program that listens where the device's node would."""
    process = start(bed, device, code, *bed.devices[device], *words)
    assert output(process).readline() == "ready\n"
    yield process
    process.kill()
    process.wait()
    output(process).close()


@pytest.fixture(scope="module", params=KINDS)
def bed(request: pytest.FixtureRequest) -> Iterator[Bed]:
    """Three devices."""
    with Bed.open(DESCRIPTION, request.param) as made:
        yield made


def test_latency_is_between_two_devices_and_not_between_others(bed: Bed) -> None:
    with serving(bed, 2, ECHO):
        far = result(start(bed, 0, PING, *bed.reach(0, 2)))
        near = result(start(bed, 1, PING, *bed.reach(1, 2)))
    assert isinstance(far, list)
    assert isinstance(near, list)
    assert min(far) >= 2 * LATENCY
    assert min(near) < LATENCY


def test_no_line_is_faster_than_described(bed: Bed) -> None:
    def rate(device: int, seconds: float) -> float:
        size = int(seconds * 125_000 * (DESCRIPTION.device[device].mbit or 0))
        with serving(bed, device, SINK, size) as sink:
            pour = start(bed, 0, POUR, *bed.reach(0, device), size)
            found = json.loads(output(sink).readline())
            pour.wait()
            output(pour).close()
        return float(found)

    # Never faster, however busy this machine is; how near they come is tools/testbed/README.md's
    # to say.
    for device, seconds in ((1, 1.0), (2, 0.5)):
        assert rate(device, seconds) <= 1.05 * 125_000 * (DESCRIPTION.device[device].mbit or 0)


def test_a_device_has_its_share_of_the_processor(bed: Bed) -> None:
    if any("cpu has no effect" in note or "cgroup" in note for note in bed.notes):
        pytest.skip("; ".join(bed.notes))
    more, less = start(bed, 0, SPIN), start(bed, 1, SPIN)
    used = result(more), result(less)
    assert isinstance(used[0], float)
    assert isinstance(used[1], float)
    # Of 0.6 s, besides a period: never more, however busy this machine.
    assert used[0] < 0.25
    assert used[1] < 0.18


def test_a_device_has_its_own_network(bed: Bed) -> None:
    code = "import os; print(os.getpid()); print(os.readlink('/proc/self/ns/net'))"
    process = start(bed, 1, code)
    with output(process) as out:
        pid, space = out.read().split()
    process.wait()
    # Whoever signals what it has started reaches the command itself.
    assert int(pid) == process.pid
    assert (space != os.readlink("/proc/self/ns/net")) == bed.namespaces


# --- what is left -------------------------------------------------------------------------------


def remains(name: str) -> list[str]:
    """Everything on this machine that has a bed's name on it."""
    places = [Path("/run/netns"), Path("/sys/class/net"), state.directory()]
    places += [Path(line.split()[1]) for line in Path("/proc/mounts").read_text().splitlines()
               if line.split()[2].startswith("cgroup")]  # fmt: skip
    places.append(Path(tempfile.gettempdir()))
    return [str(path) for place in places for path in place.glob(f"*{name}*")]


def gone(pid: int) -> bool:
    """Whether there is no such process, or only its corpse."""
    return state.start_time(pid) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [None, KeyboardInterrupt, RuntimeError])
def test_nothing_is_left_of_a_bed(kind: str, error: type[BaseException] | None) -> None:
    name, pid = "", 0
    with (
        contextlib.nullcontext() if error is None else pytest.raises(error),
        Bed.open(DESCRIPTION, kind) as made,  # type: ignore[arg-type]
    ):
        name = made.id
        with serving(made, 0, ECHO):
            assert remains(name)
        process = start(made, 1, "import signal; print(1, flush=True); signal.pause()")
        with output(process) as out:
            out.readline()
        pid = process.pid
        assert not gone(pid)
        if error is not None:
            raise error
    assert gone(pid)
    assert remains(name) == []


def mine() -> list[state.State]:
    """The beds of this process."""
    return [bed for bed in state.known() if bed.pid == os.getpid()]


@namespaces
def test_nothing_is_left_of_namespaces_that_could_not_be_made() -> None:
    before = mine()
    # The kernel shapes no line to nothing.
    bad = Description(device=(DeviceTable(), DeviceTable(mbit=1e-9)))
    with pytest.raises(UserError, match=r"no namespaces here: tc .+"), Bed.open(bad, "namespaces"):
        pass
    assert mine() == before
    # Other beds may come and go meanwhile, but none has a namespace without a file.
    spaces = {path.name.split("-")[0] for path in Path("/run/netns").glob("asb*")}
    assert spaces <= {bed.id for bed in state.known()}
    with Bed.open(bad, "auto") as bed:
        assert not bed.namespaces
        assert "no namespaces here: tc" in bed.notes[0]
    assert mine() == before


def test_a_description_made_by_a_program_is_checked() -> None:
    before = mine()
    bad = Description(device=(DeviceTable(), DeviceTable()), link=(LinkTable(between=(0, 5)),))
    with pytest.raises(UserError, match="no device 5"), Bed.open(bad, "loopback"):
        pass
    assert mine() == before


class Up:
    """``testbed up`` beside the test, with a process on its device 1."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, str(MAIN), "up", "lan-125", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if line.startswith("up;"):
                break
        self.name = lines[0].split()[1]
        inside = [sys.executable, str(MAIN), "exec", "1", "--bed", self.name, "--"]
        sleeper = "import signal; print(1, flush=True); signal.pause()"
        self.guest = subprocess.Popen(
            [*inside, sys.executable, "-c", sleeper], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert self.guest.stdout is not None
        assert self.guest.stdout.readline() == "1\n"

    def close(self) -> None:
        """Whatever is left of it here."""
        for process in (self.process, self.guest):
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture
def up() -> Iterator[Up]:
    """A bed of namespaces that another process owns."""
    if LACKING is not None:
        pytest.skip(LACKING)
    other = Up("--network", "namespaces")
    yield other
    other.close()


def down(name: str) -> None:
    """``testbed down``."""
    command = [sys.executable, str(MAIN), "down", "--bed", name]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == f"bed {name} is down\n"


def test_a_process_with_a_dead_owners_number_is_left_alone() -> None:
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as other:
        started = state.start_time(other.pid)
        assert started is not None
        bed = state.State("asb-none", other.pid, started - 1, 2, None, (), ())
        assert not state.alive(bed)
        ask_owner(bed)
        assert other.poll() is None
        assert state.alive(replace(bed, started=started))
        ask_owner(replace(bed, started=started))
        assert other.wait(240) == -signal.SIGTERM


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_takes_a_bed_down(up: Up, signum: signal.Signals) -> None:
    assert remains(up.name)
    up.process.send_signal(signum)
    assert up.process.wait(240) == 1
    assert up.guest.wait(240) != 0
    assert remains(up.name) == []


def test_down_takes_a_bed_down_that_is_up(up: Up) -> None:
    down(up.name)
    assert up.process.wait(240) == 1
    assert up.guest.wait(240) != 0
    assert remains(up.name) == []


def test_down_removes_what_a_killed_owner_has_left(up: Up) -> None:
    up.process.kill()
    up.process.wait()
    assert remains(up.name)
    down(up.name)
    assert up.guest.wait(240) != 0
    assert remains(up.name) == []


def test_the_next_bed_removes_what_a_killed_owner_has_left(up: Up) -> None:
    up.process.kill()
    up.process.wait()
    with Bed.open(DESCRIPTION, "loopback"):
        assert up.guest.wait(240) != 0
        assert remains(up.name) == []


@pytest.mark.processes
def test_the_next_bed_removes_a_killed_clusters_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, temporary = tmp_path / "two.toml", tmp_path / "temporary"
    file.write_text("[[device]]\n" * 2)
    temporary.mkdir()
    # Theirs and ours.
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    command = [sys.executable, str(MAIN), "run", str(file), "--network", "loopback", "--serve"]
    with subprocess.Popen(
        [*command, "--", "--target", "toy:layers=4,vocab=64", "--draft", "none"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    ) as process:
        assert output(process).readline().startswith("asyncspec run --connect")
        assert {path.name for path in temporary.rglob("*.toml")} == {
            "cluster-0.toml",
            "cluster-1.toml",
        }
        process.kill()
    with Bed.open(DESCRIPTION, "loopback"):
        assert list(temporary.rglob("*.toml")) == []
    assert [path for path in temporary.glob("asyncspec*") if path != state.directory()] == []
