"""The proxy as a process: every byte in order and never early, ends and resets passed on, no more
in it than its room."""

from __future__ import annotations

import random
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from asyncspec.core.errors import ClusterError, UserError
from tools.testbed.ports import free_ports
from tools.testbed.proxy_process import proxy
from tools.testbed.routes import Address, Direction, Orders, Route

LATENCY = 0.01
ROOM = 300_000
BUFFER = 262_144
WAYS = {
    "plain": Direction(0.0, 0.0, 0, ROOM, BUFFER),
    "far": Direction(LATENCY, 0.0, 0, ROOM, BUFFER),
    "shaky": Direction(0.002, 0.01, 5, ROOM, BUFFER),
    "slow": Direction(0.0, 0.0, 0, ROOM, BUFFER, ("slow",)),
    "fast": Direction(0.0, 0.0, 0, ROOM, BUFFER, ("fast",)),
}


class Place:
    """A route's two ends: a listening socket, and the proxy's address that leads to it."""

    def __init__(self, listener: socket.socket, gate: Address) -> None:
        self.listener = listener
        self.gate = gate

    def pair(self) -> tuple[socket.socket, socket.socket]:
        """A connection through the proxy: the dialler's end and the other."""
        near = socket.create_connection(self.gate, timeout=240)
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        far, _ = self.listener.accept()
        far.settimeout(240)
        far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return near, far


@pytest.fixture(scope="module")
def places() -> Iterator[dict[str, Place]]:
    """A place for each kind of way, behind one proxy."""
    listeners = {name: socket.create_server(("127.0.0.1", 0)) for name in WAYS}
    gates = dict(zip(WAYS, _free(len(WAYS)), strict=True))
    routes = tuple(
        Route(gates[name], listeners[name].getsockname(), way, way) for name, way in WAYS.items()
    )
    with proxy(Orders(routes, {"slow": 40.0, "fast": 80.0}), ()):
        yield {name: Place(listeners[name], gates[name]) for name in WAYS}
    for listener in listeners.values():
        listener.close()


def _free(count: int) -> list[Address]:
    return [("127.0.0.1", port) for port in free_ports(count)]


def _read_all(sock: socket.socket) -> bytes:
    data = bytearray()
    while piece := sock.recv(1 << 16):
        data += piece
    return bytes(data)


@pytest.mark.parametrize("name", WAYS)
def test_every_byte_arrives_in_order_and_each_end_alone(
    places: dict[str, Place], name: str
) -> None:
    rng = random.Random(name)
    said, answered = rng.randbytes(700_000), rng.randbytes(300_000)
    near, far = places[name].pair()

    def say() -> None:
        rest = memoryview(said)
        while rest:
            size = rng.choice([1, 100, 5_000, 200_000])
            near.sendall(rest[:size])
            rest = rest[size:]
        near.shutdown(socket.SHUT_WR)

    speaker = threading.Thread(target=say)
    speaker.start()
    with near, far:
        assert _read_all(far) == said
        speaker.join()
        # One way has ended; the other still works.
        far.sendall(answered)
        far.shutdown(socket.SHUT_WR)
        assert _read_all(near) == answered


def _round_trips(near: socket.socket, far: socket.socket, count: int) -> list[float]:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        near.sendall(b"ping")
        assert far.recv(100) == b"ping"
        far.sendall(b"pong")
        assert near.recv(100) == b"pong"
        times.append(time.perf_counter() - start)
    return times


def test_nothing_is_early_and_the_best_is_hardly_late(places: dict[str, Place]) -> None:
    near, far = places["far"].pair()
    with near, far:
        times = _round_trips(near, far, 30)
    assert min(times) >= 2 * LATENCY
    assert min(times) < 2 * LATENCY + 0.004
    near, far = places["shaky"].pair()
    with near, far:
        times = _round_trips(near, far, 30)
    assert min(times) >= 2 * 0.002
    assert max(times) > min(times) + 0.005


def test_the_last_piece_of_a_message_waits_for_no_acknowledgement(
    places: dict[str, Place],
) -> None:
    near, far = places["slow"].pair()
    times = []
    with near, far:
        for _ in range(11):
            start, rest = time.perf_counter(), 20_000
            near.sendall(bytes(rest))
            while rest:
                rest -= len(far.recv(rest))
            times.append(time.perf_counter() - start)
            far.sendall(b"k")
            near.recv(1)
    # On a slow line pieces come one by one. A kernel puts an acknowledgement off by 40 ms, and so
    # would delay every message; a busy machine delays some.
    assert min(times) < 0.02


@pytest.mark.parametrize("name", ["plain", "far"])
@pytest.mark.parametrize("dialler_resets", [False, True])
def test_a_reset_is_passed_on_behind_what_was_said(
    places: dict[str, Place], name: str, dialler_resets: bool
) -> None:
    near, far = places[name].pair()
    _round_trips(near, far, 1)
    one, other = (near, far) if dialler_resets else (far, near)
    one.sendall(b"last words")
    # They must have left the kernel, which forgets them at a reset.
    assert select.select([], [one], [], 5)[1]
    assert other.recv(100) == b"last words"
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    one.close()
    with other, pytest.raises(ConnectionResetError):
        other.recv(100)


def test_a_peer_that_does_not_read_stops_the_one_that_writes(places: dict[str, Place]) -> None:
    small = 65_536
    near, far = places["far"].pair()
    with near, far:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, small)
        near.setblocking(False)
        pattern = random.Random(1).randbytes(1 << 16)
        sent = bytearray()
        while select.select([], [near], [], 0.5)[1]:
            sent += pattern[: near.send(pattern)]
            # The kernel doubles a buffer for its own needs; the reader's grows up to 6 MB and has
            # two ends of its own in the proxy.
            assert len(sent) < ROOM + 2 * small + 4 * BUFFER + (7 << 20)
        near.setblocking(True)
        near.shutdown(socket.SHUT_WR)
        assert _read_all(far) == sent


def orders_of(listen: Address) -> Orders:
    """One route, to nobody."""
    way = WAYS["plain"]
    return Orders((Route(listen, ("127.0.0.1", 1), way, way),), {})


def test_a_proxy_that_cannot_start_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with (
            pytest.raises(ClusterError, match=r"proxy has not started: .*already in use") as caught,
            proxy(orders_of(taken.getsockname()), ()),
        ):
            pass
        assert "\n" not in str(caught.value)
    with (
        pytest.raises(ClusterError, match="proxy cannot be started: No such file or directory"),
        proxy(orders_of(("127.0.0.1", 1)), ("/no/such/program",)),
    ):
        pass


@pytest.mark.parametrize(
    ("inside", "outside"),
    [
        (None, ClusterError("the bed's proxy was killed by SIGKILL")),
        (ClusterError("stage 1 is gone"), ClusterError("the bed's proxy was killed by SIGKILL")),
        (UserError("a mistake"), UserError("a mistake")),
        (KeyboardInterrupt("Ctrl-C"), KeyboardInterrupt("Ctrl-C")),
    ],
)
def test_what_fails_for_want_of_a_proxy_says_so(
    inside: BaseException | None, outside: BaseException
) -> None:
    (gate,) = _free(1)

    def dies() -> None:
        with proxy(orders_of(gate), ()) as process:
            assert process is not None
            process.kill()
            process.wait()
            if inside is not None:
                raise inside

    with pytest.raises(type(outside), match=f"^{outside}$"):
        dies()


def test_an_early_dial_waits_and_a_closed_one_is_forgotten() -> None:
    late = socket.socket()
    late.bind(("127.0.0.1", 0))  # the port is ours, but nobody listens
    (gate,) = _free(1)
    way = Direction(LATENCY, 0.0, 0, ROOM, BUFFER)
    with late, proxy(Orders((Route(gate, late.getsockname(), way, way),), {}), ()):
        with socket.create_connection(gate, timeout=240) as gone:
            gone.sendall(b"stale")
            gone.shutdown(socket.SHUT_WR)
            with pytest.raises(ConnectionResetError):
                gone.recv(1)
        with socket.create_connection(gate, timeout=240) as near:
            near.sendall(b"hello")
            late.listen()
            far, _ = late.accept()
            with far:
                assert far.recv(100) == b"hello"


def test_a_rate_is_kept(places: dict[str, Place]) -> None:
    def seconds(name: str, size: int) -> float:
        near, far = places[name].pair()
        speaker = threading.Thread(target=near.sendall, args=(bytes(size),))
        start, got = time.perf_counter(), 0
        speaker.start()
        with near, far:
            while got < size:
                got += len(far.recv(1 << 16))
            taken = time.perf_counter() - start
            speaker.join()
        return taken

    # The best of some: a busy machine only ever adds, also to one of two that are compared.
    for name, mbit in (("slow", 40.0), ("fast", 80.0)):
        expected = 8 * 1.0 / mbit
        assert 0.85 * expected < min(seconds(name, 1_000_000) for _ in range(3)) < 4 * expected
