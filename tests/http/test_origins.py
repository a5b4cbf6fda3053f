"""Pages of other origins, as their browsers ask for them."""

from __future__ import annotations

import aiohttp
import pytest

from asyncspec.core.errors import UserError
from asyncspec_nodes.http.access import read_origins
from toy_service import Toy

PATH = "/v1/completions"
MINE, OTHER = "https://mine.example", "https://other.example"
ASK = {"model": "toy", "prompt": "hello", "max_tokens": 5}
ALLOW = "Access-Control-Allow-Origin"


def preflight(origin: str) -> dict[str, str]:
    return {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }


@pytest.mark.asyncio
@pytest.mark.parametrize("path", [PATH, "/v1/models", "/nowhere"])
async def test_a_preflight_needs_no_key_and_tells_nothing(path: str) -> None:
    async with Toy(keys=("k",), origins=(MINE,)) as toy, aiohttp.ClientSession(toy.url) as web:
        async with web.options(path, headers=preflight(MINE)) as reply:
            assert reply.status == 204
            assert await reply.read() == b""
            assert reply.headers[ALLOW] == MINE
            assert reply.headers["Vary"] == "Origin"
            assert "POST" in reply.headers["Access-Control-Allow-Methods"]
            allowed = reply.headers["Access-Control-Allow-Headers"]
            assert {"Authorization", "Content-Type"} <= set(allowed.split(", "))
            assert int(reply.headers["Access-Control-Max-Age"]) > 0
        async with web.options(path, headers=preflight(OTHER)) as reply:
            assert reply.status == 401
            assert ALLOW not in reply.headers
            assert reply.headers["Vary"] == "Origin"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("origins", "origin", "allowed", "vary"),
    [
        ((MINE,), MINE, MINE, "Origin"),
        ((MINE, OTHER), OTHER, OTHER, "Origin"),
        ((MINE,), OTHER, None, "Origin"),
        ((MINE,), None, None, "Origin"),
        (("*",), OTHER, "*", None),
        ((), MINE, None, None),
    ],
)
async def test_answers_of_every_kind(
    origins: tuple[str, ...], origin: str | None, allowed: str | None, vary: str | None
) -> None:
    headers = {} if origin is None else {"Origin": origin}
    async with (
        Toy(origins=origins) as toy,
        aiohttp.ClientSession(toy.url, headers=headers) as web,
    ):
        refused = origin is not None and allowed is None
        for more, status in (({}, 200), ({"stream": True}, 200), ({"n": 0}, 400)):
            async with web.post(PATH, json={**ASK, **more}) as reply:
                assert reply.status == (403 if refused else status)
                await reply.read()
                assert reply.headers.get(ALLOW) == allowed
                assert reply.headers.get("Vary") == vary


@pytest.mark.asyncio
async def test_by_default_no_other_origin_may() -> None:
    async with (
        Toy() as toy,
        aiohttp.ClientSession(toy.url) as web,
        web.options(PATH, headers=preflight(MINE)) as reply,
    ):
        assert reply.status == 405
        assert not [name for name in reply.headers if name.startswith("Access-Control")]


@pytest.mark.parametrize(
    ("given", "origin"),
    [
        ("https://Mine.example", MINE),
        ("https://mine.example:443", MINE),
        ("http://localhost:5173", "http://localhost:5173"),
        ("http://[::1]:80", "http://[::1]"),
        ("tauri://localhost", "tauri://localhost"),
        ("*", "*"),
    ],
)
def test_origins_are_taken_as_browsers_write_them(given: str, origin: str) -> None:
    assert read_origins([given]).allowed == {origin}


@pytest.mark.parametrize(
    "given", ["", "mine.example", "https://mine.example/", "https://", "null", "https://*.example"]
)
def test_invalid_origins_are_refused(given: str) -> None:
    with pytest.raises(UserError, match=r"--allow-origin is .*; it must be SCHEME://HOST"):
        read_origins([given])
