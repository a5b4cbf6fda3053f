"""Several names of the one model, as vLLM's ``--served-model-name``."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from scripted_engine import KEY, USER, serving

pytestmark = pytest.mark.asyncio

NAMES = ("toy", "org/alias", "tagged:latest")
HEADERS = {"Authorization": f"Bearer {KEY}"}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 5},
    "/v1/responses": {"input": "Hi"},
    "/api/chat": {"messages": USER, "stream": False},
    "/api/generate": {"prompt": "Hi", "stream": False},
}


@pytest.mark.parametrize("path", ROUTES)
async def test_every_route_takes_every_name_and_states_the_first(path: str) -> None:
    async with (
        serving(models=NAMES) as (url, _),
        aiohttp.ClientSession(url, headers=HEADERS) as web,
    ):
        for name in (*NAMES, "toy:latest"):
            async with web.post(path, json={**ROUTES[path], "model": name}) as reply:
                assert reply.status == 200, await reply.text()
                assert (await reply.json())["model"] == "toy"
        async with web.post(path, json={**ROUTES[path], "model": "else"}) as reply:
            assert reply.status == 404
            error = await reply.text()
        assert all(name in error for name in NAMES)


async def test_every_name_is_listed() -> None:
    async with (
        serving(models=NAMES) as (url, _),
        aiohttp.ClientSession(url, headers=HEADERS) as web,
    ):
        async with web.get("/v1/models") as reply:
            assert tuple(model["id"] for model in (await reply.json())["data"]) == NAMES
        async with web.get("/api/tags") as reply:
            assert tuple(model["name"] for model in (await reply.json())["models"]) == NAMES
        for name in NAMES:
            async with web.get(f"/v1/models/{name}") as reply:
                assert (reply.status, (await reply.json())["id"]) == (200, name)
            async with web.post("/api/show", json={"model": name}) as reply:
                assert reply.status == 200
