"""The port where machines join: what strangers may do there, and the addresses of its token."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from asyncspec_nodes.plugins.join import server
from asyncspec_nodes.plugins.join.connection import own_addresses, unmapped
from asyncspec_nodes.plugins.join.members import Member
from asyncspec_nodes.plugins.join.messages import FromMember, Offer, ToMember
from asyncspec_nodes.plugins.join.server import JoinServer
from asyncspec_nodes.plugins.join.token import Token, TokenFile


class Nobody:
    """Admits none."""

    def say(self, line: str, /) -> None:
        pass

    def admit(self, offer: Offer, seen: str, send: Callable[[ToMember], None]) -> Member:
        raise AssertionError("none shows the token")

    def received(self, name: str, message: FromMember) -> bool:
        raise AssertionError("none shows the token")

    def lost(self, member: Member) -> None:
        raise AssertionError("none shows the token")


@contextlib.asynccontextmanager
async def joining(folder: Path, host: str = "127.0.0.1") -> AsyncIterator[Token]:
    stored = TokenFile(None, lambda line: None)
    address, nobody = (host, 0), Nobody()
    async with JoinServer(folder, "up", "none", address, ("", 0), stored, nobody) as token:
        yield token


async def connect(token: Token) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Of a stranger, who checks no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return await asyncio.open_connection(token.hosts[0], token.port, ssl=context)


REQUEST = b"GET /join HTTP/1.1\r\nHost: up\r\nAuthorization: %b\r\n\r\n"


@pytest.mark.asyncio
@pytest.mark.parametrize("shown", [b"", b"\xff", b"Bearer \xc3\x28", b"Bearer 00"])
async def test_a_stranger_is_refused_and_nothing_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], shown: bytes
) -> None:
    async with joining(tmp_path) as token, asyncio.timeout(240):
        reader, writer = await connect(token)
        writer.write(REQUEST % shown)
        answer = await reader.read()  # to the end: the connection is closed
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert b"Server: asyncspec\r\n" in answer
        writer.close()
    assert capfd.readouterr().err == ""


@pytest.mark.asyncio
async def test_a_stranger_who_asks_nothing_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "LIMITS", replace(server.LIMITS, request_seconds=0.2))
    async with joining(tmp_path) as token, asyncio.timeout(240):
        with contextlib.suppress(OSError):  # on a slow machine amid the handshake
            reader, writer = await connect(token)
            with contextlib.closing(writer):
                assert await reader.read() == b""
        # One that never begins with TLS, either.
        plain, other = await asyncio.open_connection(token.hosts[0], token.port)
        with contextlib.suppress(OSError):
            assert await plain.read() == b""
        other.close()


@pytest.mark.asyncio
async def test_connections_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LIMITS", replace(server.LIMITS, connections=1))
    async with joining(tmp_path) as token, asyncio.timeout(240):
        silent, first = await connect(token)
        later, second = await connect(token)  # for which the one that says nothing is closed
        assert await silent.read() == b""
        second.write(REQUEST % b"")
        assert (await later.read()).startswith(b"HTTP/1.1 401 ")
        first.close()
        second.close()


@pytest.mark.asyncio
async def test_connections_that_agree_on_no_tls_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest are closed for those that come."""
    monkeypatch.setattr(server, "LIMITS", replace(server.LIMITS, connections=2))
    async with joining(tmp_path) as token, asyncio.timeout(240):
        address = (token.hosts[0], token.port)
        mute = [await asyncio.open_connection(*address) for _ in range(5)]
        for reader, _ in mute[:3]:
            assert await reader.read() == b""
        reader, writer = await connect(token)
        writer.write(REQUEST % b"")
        assert (await reader.read()).startswith(b"HTTP/1.1 401 ")
        for _, each in [*mute, (reader, writer)]:
            each.close()


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.asyncio
@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")
async def test_every_address_of_the_token_accepts(tmp_path: Path) -> None:
    async with joining(tmp_path, "::") as token, asyncio.timeout(240):
        assert {host for host in token.hosts if ":" in host}
        if socket.has_dualstack_ipv6():
            assert "127.0.0.1" in token.hosts
        for host in token.hosts:
            try:
                async with asyncio.timeout(20):
                    _, writer = await asyncio.open_connection(host, token.port)
                writer.close()
            except OSError:  # of an emulated network that another test has taken down meanwhile
                assert host not in own_addresses(socket.AF_INET, socket.AF_INET6)


@pytest.mark.parametrize(
    ("seen", "found"),
    [
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("::ffff:7f00:1", "127.0.0.1"),
        ("2001:db8::1", "2001:db8::1"),
        ("10.0.0.1", "10.0.0.1"),
        ("", ""),
    ],
)
def test_addresses_that_a_socket_of_both_families_sees(seen: str, found: str) -> None:
    assert unmapped(seen) == found
