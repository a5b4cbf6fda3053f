"""A reader that takes nothing is cut off, whatever is written to it; a slow one is not."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from asyncspec_nodes.http.access import ServiceOptions
from asyncspec_nodes.http.app import Service
from asyncspec_nodes.http.limits import Limits
from asyncspec_nodes.http.middleware import json_response
from asyncspec_nodes.http.options import server_context
from asyncspec_nodes.http.server import LOOKS, HttpServer, Progress
from certificates import make_keys

STALL = 0.3
SMALL, LARGE = 60_000, 20_000_000
PATHS = [f"/{kind}/{size}" for kind in ("whole", "stream") for size in (SMALL, LARGE)]


class BigAnswers(Service):
    """A service with answers of any size, whole or as a stream."""

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_get("/whole/{size}", self.whole)
        app.router.add_get("/stream/{size}", self.stream)
        return app

    async def whole(self, request: web.Request) -> web.StreamResponse:
        return json_response("x" * int(request.match_info["size"]))

    async def stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(int(request.match_info["size"]) // 10_000):
            await response.write(b"x" * 10_000)
        return response


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext | None:
    keys = tmp_path_factory.mktemp("keys")
    make_keys(keys, "one")
    return server_context(keys / "one.pem", keys / "one.key")


@asynccontextmanager
async def asked(
    path: str, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[HttpServer, socket.socket]]:
    """A server whose answer nobody has read yet, and its reader, with little room on both ends."""
    loop = asyncio.get_running_loop()
    service = BigAnswers(ServiceOptions(limits=Limits(stall_seconds=STALL)), str)
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    listening.setblocking(False)
    async with HttpServer(service, listening, tls) as server:
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.setblocking(False)
            await loop.sock_connect(reader, ("127.0.0.1", server.port))
            request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
            if tls is None:
                await loop.sock_sendall(reader, request)
                await until(server, 1)
                yield server, reader
                return
            trusting = ssl.create_default_context()
            trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
            _, writer = await asyncio.open_connection(
                sock=reader, ssl=trusting, server_hostname="localhost", limit=256
            )
            writer.write(request)
            await until(server, 1)
            yield server, reader
            writer.transport.abort()


async def until(server: HttpServer, count: int) -> None:
    """It has so many connections. A test's time-out is the bound."""
    found = server._runner.server
    assert found is not None
    while True:
        await asyncio.sleep(0)
        if len(found.connections) == count:
            return


@pytest.mark.asyncio
@pytest.mark.parametrize("path", PATHS)
async def test_a_reader_that_takes_nothing_is_cut_off(path: str) -> None:
    async with asked(path) as (server, _):
        await until(server, 0)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["whole", "stream"])
async def test_over_tls_as_well(kind: str, tls: ssl.SSLContext) -> None:
    async with asked(f"/{kind}/{LARGE}", tls) as (server, _):
        await until(server, 0)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["whole", "stream"])
async def test_a_slow_reader_gets_all(kind: str) -> None:
    async with asked(f"/{kind}/{LARGE}") as (server, reader):
        loop, taken = asyncio.get_running_loop(), 0
        begun = loop.time()
        while taken < LARGE:
            await asyncio.sleep(0)
            share = (loop.time() - begun) / (4 * STALL)
            if share < 1 and taken > share * LARGE / 2:
                continue  # a fast machine would take all of it by a hundred bytes
            piece = await loop.sock_recv(reader, 100 if share < 1 else 1 << 16)
            assert piece, "it was cut off"
            taken += len(piece)
        assert loop.time() > begun + 4 * STALL
        await until(server, 1)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=30))
def test_a_reader_is_cut_off_once_it_has_taken_nothing_for_so_long(
    looks: list[tuple[int, int]],
) -> None:
    """By what was written and taken between two looks."""
    progress, written, taken, idle = Progress(), 0, 0, 0
    for more, read in looks:
        written += more
        before, taken = taken, min(written, taken + read)
        idle = 0 if taken == written or taken > before else idle + 1
        assert progress.stalled(written, written - taken) == (idle >= LOOKS)
