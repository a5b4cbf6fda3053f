"""A node's process, here in this one: how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from asyncspec.core.machine import TaskDone
from asyncspec_nodes.cluster.config import ClusterTable, Config, DraftTable, NodeTable, TargetTable
from asyncspec_nodes.http.options import HttpOptions, HttpSocket
from asyncspec_nodes.node import listen, process
from asyncspec_nodes.node.process import Node, serve
from asyncspec_nodes.node.reports import Reporter

BODY = b'{"model": "toy", "prompt": "Once"}'
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[Node]:
    """Those that are assembled from now on. Objects of other tests stay the collector's."""
    assemble, made = process.assemble, asyncio.Queue[Node]()

    def noted(*args: Any) -> Node:
        node = assemble(*args)
        made.put_nowait(node)
        return node

    monkeypatch.setattr(process, "assemble", noted)
    monkeypatch.setattr(process, "freeze_objects", lambda: None)
    return made


async def stopping(web: aiohttp.ClientSession) -> None:
    """Until the service takes no more requests."""
    while True:
        async with web.post("/v1/completions", data=BODY) as answer:
            if "the service is stopping" in await answer.text():
                return


def test_a_node_that_fails_while_it_completes_answers_ends_at_once(
    nodes: asyncio.Queue[Node],
) -> None:
    """Not when ``drain_seconds`` are over: nobody completes them any more."""
    sock, web_sock = listen.loopback(), listen.loopback()
    for one in (sock, web_sock):
        one.setblocking(False)
    config = Config(
        TargetTable("toy:"),
        (NodeTable(0, "127.0.0.1", 1), NodeTable(1, "127.0.0.1", 1)),
        cluster=ClusterTable(name="fails", stages=1),
        draft=DraftTable("ngram"),
    )
    url = f"http://127.0.0.1:{web_sock.getsockname()[1]}"

    async def body(begun: asyncio.Event) -> AsyncIterator[bytes]:
        yield BODY[:9]
        begun.set()
        await asyncio.Event().wait()  # the rest never comes

    async def main() -> None:
        http = HttpSocket(HttpOptions(), web_sock)
        serving = asyncio.create_task(
            serve(config, 0, sock, Reporter(0, None), supervised=False, http=http)
        )
        async with aiohttp.ClientSession(url, headers=JSON) as web:
            begun = asyncio.Event()
            node = await nodes.get()
            reader = asyncio.create_task(web.post("/v1/completions", data=body(begun)))
            await begun.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            await stopping(web)
            assert not serving.done()
            node.runtime.feed(TaskDone("plan", None, None))
            with pytest.raises(Exception, match="no use for TaskDone"):
                await asyncio.wait_for(asyncio.shield(serving), 15)
            with contextlib.suppress(aiohttp.ClientError):
                assert (await reader).status == 503

    asyncio.run(asyncio.wait_for(main(), 240))
