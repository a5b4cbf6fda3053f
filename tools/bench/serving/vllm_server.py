"""A vLLM server on this machine's loopback, without quotas, and when each of its tokens comes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
from msgspec import Struct

from asyncspec.core.errors import ClusterError
from tools.bench.peers import servers, vllm
from tools.bench.peers.endpoint import MAX_SECONDS, events
from tools.testbed.ports import free_port

NO_VARIABLES: Mapping[str, str] = {}


class Timed(Struct, frozen=True):
    """An answer as its user sees it; times by ``time.monotonic``."""

    asked: float
    tokens: tuple[int, ...]
    # When each token came.
    times: tuple[float, ...]


class Server:
    """One of the ways to run vLLM."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._session = session

    @classmethod
    async def start(
        cls,
        python: Path,
        target: Path,
        kind: vllm.Kind,
        dtype: str,
        stack: AsyncExitStack,
        variables: Mapping[str, str] = NO_VARIABLES,
    ) -> Server:
        """A server that ends with ``stack``; ``variables``: further ones of its environment.
        Raises ``AsyncSpecError``."""
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="asyncspec-vllm-")))
        host, port = "127.0.0.1", free_port()
        words = vllm.command(python, target, host, port, kind, dtype)
        log = folder / "vllm.log"
        environment = {**vllm.environment(python, kind), **variables}
        process = stack.enter_context(_started(words, log, environment))
        stack.callback(process.terminate)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        name, url = f"vLLM ({kind.name})", f"http://{host}:{port}"
        await servers.healthy(name, process, log, f"{url}/health", session, vllm.LOAD_SECONDS)
        return cls(f"{url}/v1/completions", session)

    async def answer(self, prompt: str, tokens: int) -> Timed:
        """So many new tokens, greedily. Raises ``ClusterError``."""
        body = {
            "model": vllm.SERVED_AS,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
            **vllm.SETTINGS,
        }
        timeout = aiohttp.ClientTimeout(total=MAX_SECONDS)
        ids: list[int] = []
        times: list[float] = []
        asked = time.monotonic()
        async with self._session.post(self._url, json=body, timeout=timeout) as response:
            if response.status != 200:
                raise ClusterError(f"vLLM answers {response.status}: {await response.text()}")
            async for event in events(response.content):
                if "error" in event:
                    raise ClusterError(f"vLLM: {event['error']}")
                fresh = [n for choice in event["choices"] for n in choice.get("token_ids") or ()]
                ids += fresh
                times += [time.monotonic()] * len(fresh)
        return Timed(asked, tuple(ids), tuple(times))


def _started(words: list[str], log: Path, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=variables
        )
