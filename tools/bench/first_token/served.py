"""Other engines as readers: llama.cpp's RPC pipeline and vLLM's server, started by the bench."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from asyncspec.core.errors import ClusterError
from tools.bench.first_token.readers import Alone, FirstToken, Pipeline
from tools.bench.first_token.setting import Setting
from tools.bench.peers import llama_cpp, servers, vllm
from tools.bench.peers.endpoint import MAX_SECONDS
from tools.testbed.bed import Bed

SPIN_SECONDS = 1.5
"""vLLM's processes wait for their next message in a loop for a second after the last one
(``SpinCondition``), which would take a core from the reader that is asked next."""

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""vLLM's names."""


LIBRARY, WORKER = "build/bin/libllama.so", llama_cpp.BINARIES[1]
"""What its pipeline needs of llama.cpp's build."""


class Served:
    """A server that is asked for one token of an answer."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        body: Mapping[str, object],
        token: Callable[[Any], int],
        processes: Sequence[subprocess.Popen[bytes]],
    ) -> None:
        """``body``: of a request, beside its prompt; ``token``: the first one of a reply."""
        self._session, self._url, self._body, self._token = session, url, body, token
        self._processes = processes

    @property
    def pids(self) -> Sequence[int]:
        started = [psutil.Process(process.pid) for process in self._processes]
        return [p.pid for root in started for p in (root, *root.children(recursive=True))]

    async def read(self, prompt: Sequence[int]) -> FirstToken:
        timeout = aiohttp.ClientTimeout(total=MAX_SECONDS)
        body = {**self._body, "prompt": list(prompt)}
        start = time.perf_counter()
        try:
            async with self._session.post(self._url, json=body, timeout=timeout) as response:
                if response.status != 200:
                    said = " ".join((await response.text()).split())[:200]
                    raise ClusterError(f"{self._url} answers {response.status}: {said}")
                reply = await response.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ClusterError(f"cannot ask {self._url}: {error!r}") from None
        return FirstToken(time.perf_counter() - start, self._token(reply))


async def rpc_pipeline(setting: Setting, stages: int, bed: Bed, log: Path) -> Alone:
    """llama.cpp's RPC pipeline, a thread each on all devices of ``bed``, with chunks as long as
    ours where stages keep a pace. Raises ``ClusterError``."""
    sources = setting.llama_cpp
    assert sources is not None
    workers = range(1, stages + 1)
    processes = [
        await llama_cpp.start_worker(
            bed, worker, sources, setting.stage_seconds, log.with_name(f"{log.stem}-{worker}.log")
        )
        for worker in workers
    ]
    pipeline = Pipeline(
        places=["{}:{}".format(*bed.reach(0, worker)) for worker in workers],
        pids=[process.pid for process in processes],
        prefix=bed.prefix(0),
        environment={"LLAMA_CPP_LIB_PATH": str((sources / LIBRARY).parent)},
    )
    return Alone(setting, 1, pipeline)


async def vllm_alone(
    setting: Setting, threads: int, bed: Bed, log: Path, session: aiohttp.ClientSession
) -> Served:
    """vLLM in one process with so many threads, on the first device of ``bed``. Raises
    ``ClusterError``."""
    assert setting.vllm is not None
    host, port = bed.devices[0]
    kind = vllm.Kind("plain", threads=threads)
    target, dtype = setting.target.absolute(), DTYPES[setting.dtype]
    words = vllm.command(setting.vllm, target, host, port, kind, dtype, setting.slots)
    process = servers.start(bed, 0, words, log, vllm.environment(setting.vllm, kind))
    url = f"http://{host}:{port}"
    await servers.healthy("vLLM", process, log, f"{url}/health", session, vllm.LOAD_SECONDS)
    body = {
        **vllm.SETTINGS,
        "model": vllm.SERVED_AS,
        "max_tokens": 1,
        "temperature": 0,
        "return_token_ids": True,
    }
    return Served(
        session,
        f"{url}/v1/completions",
        body,
        lambda reply: reply["choices"][0]["token_ids"][0],
        [process],
    )
