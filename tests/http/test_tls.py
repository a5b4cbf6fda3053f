"""HTTPS: with a certificate and its key the same service, and nothing in the clear."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import aiohttp
import pytest

from asyncspec.core.errors import UserError
from asyncspec_nodes.http.options import server_context
from toy_service import Toy

KEYS = Path(__file__).parents[2] / "nodes" / "examples" / "make-keys.sh"


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and two boxes' certificates and keys."""
    path = tmp_path_factory.mktemp("keys")
    subprocess.run(["bash", str(KEYS), str(path), "one", "two"], check=True, capture_output=True)
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


def test_neither_is_plain_http() -> None:
    assert server_context(None, None) is None
