"""HTTPS: with a certificate and its key the same service, and nothing in the clear."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ssl
import subprocess
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from asyncspec.core.errors import UserError
from asyncspec_nodes.cluster.config import SecurityTable
from asyncspec_nodes.cluster.security import contexts
from asyncspec_nodes.http.limits import Limits
from asyncspec_nodes.http.metrics import Metrics
from asyncspec_nodes.http.options import server_context
from asyncspec_nodes.http.places import Places
from asyncspec_nodes.http.server import Connection
from certificates import make_keys
from toy_service import Toy


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and two boxes' certificates and keys."""
    path = tmp_path_factory.mktemp("keys")
    make_keys(path, "one", "two")
    return path


@pytest.mark.asyncio
async def test_the_same_service_over_tls(pki: Path) -> None:
    trusted = ssl.create_default_context(cafile=str(pki / "ca.pem"))
    trusted.check_hostname = False  # the certificate names a box, not an address
    tls = server_context(pki / "one.pem", pki / "one.key")
    async with Toy(tls=tls) as toy, aiohttp.ClientSession(toy.url) as web:
        assert toy.url.startswith("https://")
        body = {"model": "toy", "prompt": "abc", "max_tokens": 5, "stream": True}
        async with web.post("/v1/completions", json=body, ssl=trusted) as answer:
            assert answer.status == 200
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await web.get("/health")
        plain = toy.url.replace("https", "http")
        with pytest.raises(aiohttp.ClientError):
            await web.get(f"{plain}/health")


@pytest.mark.asyncio
async def test_connections_with_and_before_tls_have_one_bound(pki: Path) -> None:
    trusted = ssl.create_default_context(cafile=str(pki / "ca.pem"))
    trusted.check_hostname = False
    tls = server_context(pki / "one.pem", pki / "one.key")
    async with Toy(tls=tls, connections=3) as toy:
        address = ("127.0.0.1", toy.port)
        served = [await asyncio.open_connection(*address, ssl=trusted) for _ in range(2)]
        for reader, writer in served:
            writer.write(b"HEAD /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        mute = [await asyncio.open_connection(*address) for _ in range(4)]
        for reader, _ in [*served, mute[0]]:
            await reader.read()  # to its end
        assert not any(reader.at_eof() for reader, _ in mute[1:])
        for _, writer in served + mute:
            writer.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("secure", [True, False])
async def test_what_a_stranger_leaves_behind(secure: bool, pki: Path) -> None:
    """At most the latest is still known, long before the time of its first request is over."""
    tls = server_context(pki / "one.pem", pki / "one.key") if secure else None
    async with Toy(tls=tls, request_seconds=3600.0) as toy:
        for sent in (b"", b"no TLS, and no HTTP"):
            _, writer = await asyncio.open_connection("127.0.0.1", toy.port)
            writer.write(sent)
            writer.close()
            await writer.wait_closed()
        reader, writer = await asyncio.open_connection("127.0.0.1", toy.port)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        with contextlib.suppress(OSError):
            await reader.read()  # so that the others were accepted
        writer.close()
        # By type alone, as a weak proxy answers `isinstance` for an object that may be gone.
        while sum(issubclass(type(one), Connection) for one in gc.get_objects()) > 1:
            await asyncio.sleep(0)
            gc.collect()


@pytest.mark.asyncio
async def test_a_tls_connection_that_is_closed_twice_is_looked_at_no_more(pki: Path) -> None:
    """As aiohttp does where a machine is unplugged: asyncio's transport then has no buffer to ask
    for, until the time for its shutdown is over."""
    failures: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failures.append(context))
    made: asyncio.Queue[Connection] = asyncio.Queue()
    server = web.Server(lambda request: web.Response())  # type: ignore[arg-type, return-value]
    tls = server_context(pki / "one.pem", pki / "one.key")

    class Made(Connection):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            made.put_nowait(self)

    def accept() -> Connection:
        return Made(server, Metrics(), Limits(), Places(Limits()), lambda made: None)

    listening = await loop.create_server(accept, "127.0.0.1", 0, ssl=tls)
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    port = listening.sockets[0].getsockname()[1]
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
    connection = await made.get()
    transport = connection.transport
    assert isinstance(transport, asyncio.Transport)
    transport.close()
    transport.close()
    connection._check_progress(transport)
    writer.close()
    listening.close()
    await server.shutdown()
    assert not failures


@pytest.mark.parametrize(
    ("certificate", "key", "says"),
    [
        ("one.pem", None, "belong together"),
        (None, "one.key", "belong together"),
        ("none.pem", "one.key", "there is no file"),
        ("one.pem", "two.key", "do not fit together"),
        ("one.key", "one.key", "do not fit together"),
    ],
)
def test_invalid_tls_files_are_reported(
    pki: Path, certificate: str | None, key: str | None, says: str
) -> None:
    paths = [None if name is None else pki / name for name in (certificate, key)]
    with pytest.raises(UserError, match=says):
        server_context(*paths)


def test_an_encrypted_key_is_not_asked_for_on_the_terminal(pki: Path, tmp_path: Path) -> None:
    key = tmp_path / "secret.key"
    encrypt = ("openssl", "pkey", "-in", pki / "one.key", "-aes256", "-passout", "pass:x", "-out")
    subprocess.run([*encrypt, key], check=True, capture_output=True)
    with pytest.raises(UserError, match=r"--tls-key: .*secret.key is encrypted; give it without"):
        server_context(pki / "one.pem", key)
    files = {"ca": pki / "ca.pem", "certificate": pki / "one.pem", "key": key}
    with pytest.raises(UserError, match=r"\[security\] key: .*secret.key is encrypted"):
        contexts(SecurityTable(**{name: str(file) for name, file in files.items()}))


@pytest.mark.parametrize("name", ["ca", "certificate", "key", "crl"])
def test_the_file_that_cannot_be_read_is_named(name: str, pki: Path, tmp_path: Path) -> None:
    """A folder stands for a file of another user: tests may run as root, who may read all."""
    files = {"ca": pki / "ca.pem", "certificate": pki / "one.pem", "key": pki / "one.key"}
    table = SecurityTable(**{one: str(file) for one, file in {**files, name: tmp_path}.items()})
    with pytest.raises(UserError) as error:
        contexts(table)
    assert str(error.value) == f"[security] {name}: {tmp_path} cannot be read: Is a directory"
    with pytest.raises(UserError, match=f"--tls-key: {tmp_path} cannot be read"):
        server_context(pki / "one.pem", tmp_path)


def test_neither_is_plain_http() -> None:
    assert server_context(None, None) is None
