"""What a client is told of an address where no draft node answers it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import uvloop

from actor.local_cluster import QUICK
from asyncspec.actor.mesh import PLAIN, REFUSED_CERTIFICATE, Security
from asyncspec.core.errors import AsyncSpecError, ClusterError, UserError
from asyncspec_nodes.client.client import Client
from asyncspec_nodes.cluster.config import SecurityTable
from asyncspec_nodes.cluster.security import contexts
from asyncspec_nodes.plugins.join import authority
from certificates import make_keys


@pytest.fixture
def security(tmp_path: Path) -> Security:
    make_keys(tmp_path, "box")
    names = (tmp_path / name for name in ("ca.pem", "box.pem", "box.key"))
    return contexts(SecurityTable(*map(str, names)))


async def refused(
    answer: bytes, tls: ssl.SSLContext | None, mine: Security = PLAIN
) -> tuple[str, AsyncSpecError]:
    """An address, and what ``Client.connect`` says of a peer there that answers so, whatever it is
    sent."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer)
        writer.close()

    async with asyncio.timeout(240):
        async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls) as server:
            host, port = server.sockets[0].getsockname()
            with pytest.raises(AsyncSpecError) as raised:
                await Client.connect(host, port, "", security=mine, options=QUICK)
            return f"{host}:{port}", raised.value


def refusal(answer: bytes) -> str:
    """Why a peer without TLS is no draft node."""
    _, error = asyncio.run(refused(answer, None))
    assert isinstance(error, ClusterError)
    return str(error).partition(" refuses this client: ")[2]


def test_an_http_service_is_named_as_such() -> None:
    said = refusal(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    assert said == "the peer answers in HTTP; give the address of a node itself"


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_cluster_with_keys_wants_its_file(
    security: Security, factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Which says where this machine's certificate is; that is the user's to give."""
    with asyncio.Runner(loop_factory=factory) as runner:
        where, error = runner.run(refused(b"", security.server))
    assert isinstance(error, UserError)
    assert str(error) == (
        f"the draft node at {where} wants TLS: its cluster has keys ([security]); give --config "
        "FILE, the cluster file, with a certificate and key of this machine beside it"
    )


@pytest.mark.parametrize(("days", "says"), [(-9999, "has expired"), (9999, "is not yet valid")])
def test_a_certificate_of_another_time_names_the_clock(
    days: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A board without a battery wakes up decades ago."""
    ours, other = tmp_path / "ours", tmp_path / "other"
    signer = authority.Authority.new()
    for folder in (ours, other):
        folder.mkdir()
        identity = authority.Identity(folder, "box")
        identity.receive(signer.pem, signer.issue(identity.request, "node"))
        then = SimpleNamespace(now=lambda zone: datetime.now(zone) + timedelta(days=days))
        module = SimpleNamespace(datetime=then, UTC=UTC, timedelta=timedelta)
        monkeypatch.setattr(authority, "datetime", module)
    names = (authority.CA, authority.CERTIFICATE, authority.KEY)
    mine, theirs = (
        contexts(SecurityTable(*(str(folder / name) for name in names))) for folder in (ours, other)
    )
    where, error = asyncio.run(refused(b"", theirs.server, mine))
    assert str(error) == (
        f"cannot connect to the draft node at {where}: its certificate is refused: certificate "
        f"{says}; this machine's clock says {datetime.now(UTC):%Y-%m-%d}"
    )


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_peer_that_refuses_our_certificate(
    security: Security, tmp_path: Path, factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """It only closes the connection, whatever it does not like of it."""
    other = tmp_path / "other"
    make_keys(other, "box")
    files = (other / "ca.pem", tmp_path / "box.pem", tmp_path / "box.key")
    stranger = contexts(SecurityTable(*map(str, files)))
    with asyncio.Runner(loop_factory=factory) as runner:
        where, error = runner.run(refused(b"", stranger.server, security))
    assert str(error) == (
        f"the node at {where} refuses this client: the peer closed the connection: "
        f"{REFUSED_CERTIFICATE}"
    )


def test_a_peer_that_closes_without_a_word() -> None:
    assert refusal(b"") == "the peer closed the connection"


def test_a_name_that_nobody_knows() -> None:
    """The resolver's errors have numbers of their own."""
    host = "fe80::1%nosuchif"  # fails without a name server
    with pytest.raises(ClusterError) as raised:
        asyncio.run(Client.connect(host, 1, ""))
    said = f"cannot connect to the draft node at {host}:1: its name cannot be resolved: "
    assert str(raised.value).startswith(said)
    assert "error -" not in str(raised.value)


@pytest.mark.parametrize("host", ["a..b", "x" * 70 + ".com"])
@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_name_that_can_be_none(
    factory: Callable[[], asyncio.AbstractEventLoop], host: str
) -> None:
    with asyncio.Runner(loop_factory=factory) as runner, pytest.raises(UserError) as raised:
        runner.run(Client.connect(host, 1, ""))
    assert str(raised.value) == f"{host} is no host name and no address; correct the address"
