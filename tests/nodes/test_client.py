"""What a client is told of an address where no draft node answers it."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from pathlib import Path

import pytest

from asyncspec.actor.mesh import Security
from asyncspec.errors import ClusterError
from asyncspec_nodes.client.client import Client
from asyncspec_nodes.cluster.config_tables import SecurityTable
from asyncspec_nodes.cluster.security import contexts
from shell.local import QUICK

KEYS = Path(__file__).parents[2] / "nodes" / "examples" / "make-keys.sh"


@pytest.fixture
def security(tmp_path: Path) -> Security:
    subprocess.run(["bash", str(KEYS), str(tmp_path), "box"], check=True, capture_output=True)
    names = (tmp_path / name for name in ("ca.pem", "box.pem", "box.key"))
    return contexts(SecurityTable(*map(str, names)))


def refusal(answer: bytes, *, tls: ssl.SSLContext | None = None) -> str:
    """What ``Client.connect`` says of a peer that answers so, whatever it is sent."""

    async def main() -> str:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.write(answer)
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls) as server:
            host, port = server.sockets[0].getsockname()
            with pytest.raises(ClusterError) as raised:
                await Client.connect(host, port, "", options=QUICK)
            return str(raised.value).partition(" refuses this client: ")[2]

    return asyncio.run(asyncio.wait_for(main(), 30))


def test_an_http_service_is_named_as_such() -> None:
    said = refusal(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    assert said == "the peer answers in HTTP; give the address of a node itself"


def test_a_cluster_with_keys_wants_them(security: Security) -> None:
    said = refusal(b"", tls=security.server)
    assert said == "the peer closed the connection; if the cluster has keys, give --config FILE"
