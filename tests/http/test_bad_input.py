"""What no client should send: the right status, the API's error body, and the service goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import aiohttp.web
import pytest
import pytest_asyncio

from asyncspec_nodes.http import middleware
from toy_service import ENDLESS, Toy

pytestmark = pytest.mark.asyncio

ASK = {"model": "toy", "prompt": "hello", "max_tokens": 5}
LONG = {**ASK, "max_tokens": ENDLESS, "ignore_eos": True}
PATH = "/v1/completions"
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def seconds() -> float:
    """For a body, and for a connection's first request."""
    return 60.0


in_a_hurry = pytest.mark.parametrize("seconds", [0.5], ids=[""])


@pytest_asyncio.fixture
async def toy(seconds: float) -> AsyncIterator[Toy]:
    limits = {"body_bytes": 10_000, "body_seconds": seconds, "request_seconds": seconds}
    async with Toy("link", prompt_length=1000, **limits) as toy:
        yield toy
        # Whatever has happened, it still serves; those who left may have to be noticed first.
        async with aiohttp.ClientSession(toy.url) as web:
            while (status := await asked(web)) == 429:
                pass
        assert status == 200
        await toy.settled()
        assert toy.service.concurrency.taken == 0


async def asked(web: aiohttp.ClientSession) -> int:
    """What it says to a sound request."""
    async with web.post(PATH, json=ASK) as reply:
        await reply.read()
        return reply.status


async def error(reply: aiohttp.ClientResponse) -> dict[str, str]:
    body = json.loads(await reply.read())
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    inner: dict[str, str] = body["error"]
    return inner


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b'{"model": "toy", "prompt": "\xc3"}', 400),
        (b"[" * 9000, 400),
        (b"{}" + b" " * 20_000, 413),
        (b'{"model": "toy", "prompt": {}}', 400),
        (b'{"model": "toy", "prompt": ""}', 400),
        (b'{"model": "toy", "prompt": [[]]}', 400),
        (b'{"model": "toy", "prompt": [true]}', 400),
        (b'{"model": "toy", "prompt": "x", "max_tokens": -5}', 400),
        (b'{"model": "other", "prompt": "x"}', 404),
        (b'{"model": "toy", "prompt": "' + b"x" * 1001 + b'"}', 400),
        (b'{"model": "toy", "prompt": "x", "n": 100}', 400),
    ],
)
async def test_bodies(toy: Toy, body: bytes, status: int) -> None:
    async with (
        aiohttp.ClientSession(toy.url) as web,
        web.post(PATH, data=body, headers=JSON) as reply,
    ):
        assert reply.status == status
        assert reply.headers["Server"] == "asyncspec"
        assert reply.content_type == "application/json"
        assert (await error(reply))["message"]


async def test_a_body_without_a_length_is_bounded_as_well(toy: Toy) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield b" " * 1000

    async with (
        aiohttp.ClientSession(toy.url) as web,
        web.post(PATH, data=parts(), headers=JSON) as reply,
    ):
        assert reply.status == 413
        assert (await error(reply))["code"] == "request_too_large"


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/v1/nothing", {}, 404),
        ("POST", PATH, {"Content-Type": "text/plain"}, 415),
        ("POST", PATH, {"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ("POST", PATH, {**JSON, "Content-Encoding": "gzip"}, 415),
        ("GET", "/page/../app.py", {}, 404),
        ("GET", "/page/%2e%2e/app.py", {}, 404),
    ],
)
async def test_requests(
    toy: Toy, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    async with (
        aiohttp.ClientSession(toy.url) as web,
        web.request(method, path, headers=headers, data=b"") as reply,
    ):
        assert reply.status == status
        await error(reply)


@pytest.mark.parametrize(
    ("method", "path", "route", "allow"),
    [
        ("GET", PATH, PATH, "POST"),
        ("OPTIONS", PATH, PATH, "POST"),
        ("DELETE", "/v1/models/toy", "/v1/models/{name}", "GET, HEAD"),
        ("POST", "/health", "/health", "GET, HEAD"),
    ],
)
async def test_methods(toy: Toy, method: str, path: str, route: str, allow: str) -> None:
    async with aiohttp.ClientSession(toy.url) as web:
        async with web.request(method, path) as reply:
            assert reply.status == 405
            assert reply.headers["Allow"] == allow
            assert (await error(reply))["code"] == "method_not_allowed"
        async with web.get("/metrics") as reply:
            assert f'{{method="{method}",route="{route}",status="405"}} 1.0' in await reply.text()


async def connect(toy: Toy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", toy.port)


def post(body: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {size}\r\n\r\n".encode() + body


KEYED = b" HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer sk-secret\r\n"


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03secret",
        b"GET secret\r\n\r\n",
        b"GET /" + KEYED + b"Content-Length: -1 secret\r\n\r\n",
        b"GET /" + KEYED + b"X-A: secret\x01\r\n\r\n",
        b"GET /" + KEYED + b"X-A: secret" + b"a" * 9_000 + b"\r\n\r\n",
        b"GET /secret" + b"a" * 100_000 + KEYED + b"\r\n",
        b"GET http://[secret/" + KEYED + b"\r\n",
        b"GET /" + KEYED + b"".join(b"X-%d: secret\r\n" % i for i in range(1000)) + b"\r\n",
        b"POST " + PATH.encode() + KEYED + b"Transfer-Encoding: chunked\r\n\r\nZZsecret\r\n",
    ],
)
async def test_bytes_that_are_not_http(
    toy: Toy,
    garbage: bytes,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is told so in the API's form, and nothing of it is written down."""
    reader, writer = await connect(toy)
    writer.write(garbage)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400"))
    assert b"application/json" in head
    assert b"\r\nServer: asyncspec\r\n" in head
    assert json.loads(body)["error"]["code"] == "invalid_http"
    assert capsys.readouterr().err == "a request from 127.0.0.1 that is not HTTP was refused\n"
    assert not caplog.records
    async with aiohttp.ClientSession(toy.url) as web, web.get("/metrics") as reply:
        assert ',route="unknown",status="400"} 1.0' in await reply.text()


CHUNKED = (
    f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    "Transfer-Encoding: chunked\r\nExpect: {}\r\n\r\n"
)


@pytest.mark.parametrize(
    "rest", [b"ZZsecret\r\n", b"2\r\n{}secret", b"2\r\n{}\r\n0\r\nsecret\r\n\r\n"]
)
async def test_a_body_that_is_no_http_is_refused_at_once(
    rest: bytes, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Also where its head has come before and is worked on."""
    async with Toy(body_seconds=20.0) as toy:
        reader, writer = await connect(toy)
        writer.write(CHUNKED.format("100-continue").encode())
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        writer.write(rest)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["code"] == "invalid_http"
        assert capsys.readouterr().err == "a request that is not HTTP was refused\n"
        assert not caplog.records
        async with aiohttp.ClientSession(toy.url) as web, web.get("/metrics") as reply:
            assert (
                f'requests_total{{method="POST",route="{PATH}",status="400"}} 1.0'
                in await reply.text()
            )


@pytest.mark.parametrize(
    ("asked", "route"),
    [
        (CHUNKED, PATH),
        ("GET /health HTTP/1.1\r\nHost: localhost\r\nExpect: {}\r\n\r\n", "/health"),
        ("GET /nowhere HTTP/1.1\r\nHost: localhost\r\nExpect: {}\r\n\r\n", "unknown"),
    ],
)
async def test_unsupported_expectations(toy: Toy, asked: str, route: str) -> None:
    reader, writer = await connect(toy)
    writer.write(asked.format("more").encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 417 ")
    assert b"Content-Type: application/json" in head
    inner = json.loads(body)["error"]
    assert (inner["type"], inner["code"]) == ("invalid_request_error", "expectation_failed")
    assert "Expect: 100-continue" in inner["message"]
    async with aiohttp.ClientSession(toy.url) as web, web.get("/metrics") as reply:
        assert f',route="{route}",status="417"}} 1.0' in await reply.text()


async def test_our_own_mistake_outside_of_all_handlers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written down with its place, and told in the API's form."""

    async def broken(request: aiohttp.web.Request) -> str:
        raise RuntimeError("broken")

    monkeypatch.setattr(middleware, "route_of", broken)
    async with (
        Toy() as toy,
        aiohttp.ClientSession(toy.url) as web,
        web.get("/health") as reply,
    ):
        assert reply.status == 500
        said = await error(reply)
    assert (said["code"], said["message"]) == ("internal", "this service has made a mistake")
    assert "RuntimeError: broken" in capsys.readouterr().err


@in_a_hurry
async def test_a_slow_writer_is_given_up(toy: Toy) -> None:
    reader, writer = await connect(toy)
    writer.write(post(b'{"model":', length=500))
    assert (await reader.readline()).startswith(b"HTTP/1.1 408")
    writer.close()


@in_a_hurry
async def test_a_silent_connection_is_closed(toy: Toy) -> None:
    silent, half = await connect(toy), await connect(toy)
    half[1].write(b"GET /health HTTP/1.1\r\nHost:")
    for reader, writer in (silent, half):
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()


async def test_a_thousand_connections_opened_and_dropped(toy: Toy) -> None:
    async def one(number: int) -> None:
        _, writer = await connect(toy)
        # Some say nothing, some half of it, some ask and leave without the answer.
        if number % 3 == 1:
            writer.write(post(b'{"model": "toy"', length=99))
        if number % 3 == 2:
            writer.write(post(json.dumps({**LONG, "stream": number % 2 == 0}).encode()))
        await writer.drain()
        writer.transport.abort()

    for batch in range(10):
        await asyncio.gather(*(one(100 * batch + i) for i in range(100)))
    await toy.settled()
