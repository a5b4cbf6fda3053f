"""llama.cpp, started by the bench: alone on one device, and as its own pipeline of several.

Its pipeline is its RPC backend: ``llama-server`` on the device where our draft node is, a
``ggml-rpc-server`` with as many layers as another on each of the others. Each is one peer without
speculation and one with the same draft model as ours.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import torch
from msgspec import Struct

from asyncspec.core.errors import UserError
from asyncspec.plugins.llama.devices import find
from tools.bench.enlarge import stored_dtype
from tools.bench.peers import servers
from tools.bench.peers.comparison import LOOKUP, Comparison, Engine
from tools.bench.peers.endpoint import Endpoint
from tools.bench.peers.generate import ALL, ONE
from tools.bench.peers.servers import Served
from tools.testbed.bed import Bed
from tools.testbed.ports import free_ports
from tools.testbed.routes import Address
from tools.testbed.tables import Description

CONVERT = Path(__file__).with_name("gguf_child.py")
PACE = Path(__file__).with_name("pace_child.py")
BINARIES = ("build/bin/llama-server", "build/bin/ggml-rpc-server")
SETTINGS = {"cache_prompt": False, "ignore_eos": True}
"""Of every request: each reads its prompt, and goes on after an end of text, as everywhere."""

SLOTS = 2048
"""Of the cache."""

LOOKUP_LENGTHS = ["--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "8"]
"""Tokens that must match, and that are copied: its own 12 and 48 find nothing in short answers."""


KINDS_OF_WEIGHTS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


class Models(Struct, frozen=True):
    """GGUF files."""

    target: Path
    draft: Path


def check(sources: Path, files: Sequence[str] = BINARIES) -> None:
    """Raises ``UserError`` where llama.cpp has not been built there."""
    for name in files:
        if not (sources / name).is_file():
            raise UserError(
                f"--llama-cpp {sources}: no {name}; build it there (cmake -B build -DGGML_RPC=ON "
                "&& cmake --build build --target llama-server ggml-rpc-server)"
            )


def converted(
    sources: Path, target: Path, draft: Path, folder: Path, gguf: str = "stored"
) -> Models:
    """Both checkpoints as GGUF files in ``folder``, weights in the type they are stored in, the
    target's in ``gguf``. Raises ``UserError`` with what the converter says."""
    made = Models(folder / "target.gguf", folder / "draft.gguf")
    for model, file in ((target, made.target), (draft, made.draft)):
        kind = KINDS_OF_WEIGHTS[stored_dtype(model)]
        command = [sys.executable, "-P", str(CONVERT), str(sources), str(model), str(file), kind]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode or not file.is_file():
            said = done.stderr.strip().splitlines()
            raise UserError(
                f"--llama-cpp: its converter cannot convert {model}: "
                f"{said[-1] if said else f'it ended with {done.returncode}'}"
            )
    if gguf == "stored":
        return made
    from tools.check_device.convert import quantise

    return Models(quantise(made.target, folder / f"target-{gguf}.gguf", gguf), made.draft)


def server_command(
    sources: Path,
    models: Models,
    at: Address,
    threads: int,
    workers: Sequence[Address],
    *,
    drafts: bool,
    gpu: str | None,
    lookup: bool = False,
) -> list[str]:
    """``llama-server``; ``workers``: the RPC servers that have its layers, if any have, on the
    first GPU that their build finds. ``gpu``: ggml's name of the one that it computes on."""
    host, port = at
    command = [str(sources / BINARIES[0]), "--model", str(models.target)]
    command += ["--host", host, "--port", str(port), "--threads", str(threads)]
    command += ["--ctx-size", str(SLOTS), "--parallel", "1", "--cache-ram", "0", "--fit", "off"]
    if workers:
        places = ",".join(f"{host}:{port}" for host, port in workers)
        even = ",".join("1" for _ in workers)
        command += ["--rpc", places, "--n-gpu-layers", "all", "--tensor-split", even]
        # Its own GPU would be one more stage.
        command += ["--device", ",".join(f"RPC{n}" for n in range(len(workers)))] if gpu else []
    elif gpu:
        command += ["--n-gpu-layers", "all"]
    if drafts:
        kinds = "ngram-simple,draft-simple" if lookup else "draft-simple"
        command += ["--spec-type", kinds, "--model-draft", str(models.draft)]
        command += LOOKUP_LENGTHS if lookup else []
        command += ["--device-draft", gpu or "none"]
        command += [] if gpu else ["--threads-draft", str(threads)]
    return command


def worker_command(sources: Path, at: Address) -> list[str]:
    """``ggml-rpc-server`` with one thread."""
    host, port = at
    return [str(sources / BINARIES[1]), "--host", host, "--port", str(port), "--threads", "1"]


def pace_command(at: Address, worker: Address, seconds: float) -> list[str]:
    """A relay before a worker: each graph takes so many ``seconds`` at least."""
    way = (at[0], str(at[1]), worker[0], str(worker[1]), str(seconds))
    return [sys.executable, "-P", str(PACE), *way]


class Kind(Struct, frozen=True):
    """One of the ways to run it."""

    where: str
    drafts: bool
    lookup: bool = False

    @property
    def name(self) -> str:
        """As the table shows it."""
        way = ("draft" if self.drafts else "plain") + (LOOKUP if self.lookup else "")
        return f"llama.cpp: {way}, {self.where}"

    def bed(self, comparison: Comparison) -> Description:
        """The devices it is given. Raises ``UserError``."""
        return comparison.our_bed() if self.where == PIPELINE else comparison.generate_bed()

    @property
    def device(self) -> int:
        """Of that bed: where its server is."""
        return 1 if self.where == ALL else 0

    def workers(self, comparison: Comparison) -> range:
        """The devices that have its layers, if it is not the server's."""
        return range(1, comparison.devices if self.where == PIPELINE else 1)

    def cores(self, comparison: Comparison) -> float:
        """Of all the devices it has."""
        return comparison.cpu if self.where == ONE else comparison.all_cores


PIPELINE = "pipeline"
KINDS = (
    *(Kind(where, drafts) for where in (ONE, ALL, PIPELINE) for drafts in (False, True)),
    Kind(PIPELINE, drafts=True, lookup=True),
)


async def start(
    comparison: Comparison,
    models: Models,
    folder: Path,
    session: aiohttp.ClientSession,
    stack: AsyncExitStack,
) -> list[Served]:
    """Start all kinds of the comparison's ``llama_cpp``; they end with ``stack``. Raises
    ``AsyncSpecError``."""
    sources = comparison.llama_cpp
    assert sources is not None
    peers: list[Served] = []
    gpu = find(comparison.device)
    for kind in KINDS:
        bed = stack.enter_context(Bed.open(kind.bed(comparison), comparison.network))
        here, workers = bed.devices[kind.device], kind.workers(comparison)
        # Its server ends where it meets a worker that does not listen yet.
        for device in workers:
            log = folder / f"{kind.name}-{device}.log"
            await start_worker(bed, device, sources, comparison.stage_seconds, log)
        places = [bed.reach(kind.device, device) for device in workers]
        threads = 1 if workers else math.ceil(kind.cores(comparison))
        command = server_command(
            sources,
            models,
            here,
            threads,
            places,
            drafts=kind.drafts,
            gpu=gpu.name if gpu else None,
            lookup=kind.lookup,
        )
        log = folder / f"{kind.name}.log"
        url = f"http://{here[0]}:{here[1]}"
        server = servers.start(bed, kind.device, command, log)
        await servers.healthy(kind.name, server, log, f"{url}/health", session)
        engine = Engine(kind.name, f"{url}/v1", "any")
        cores = kind.cores(comparison) if bed.limited else None
        peers.append(Served(kind.name, cores, Endpoint(engine, session, SETTINGS)))
    return peers


async def start_worker(
    bed: Bed, device: int, sources: Path, seconds: float, log: Path
) -> subprocess.Popen[bytes]:
    """Start a device's worker, at a pace where graphs take ``seconds``. Raises ``ClusterError``."""
    at = bed.devices[device]
    behind = (at[0], free_ports(1)[0]) if seconds else at
    worker = await servers.listening(bed, device, worker_command(sources, behind), behind, log)
    if seconds:
        command = pace_command(at, behind, seconds)
        await servers.listening(bed, device, command, at, log.with_stem(f"{log.stem}-pace"))
    return worker
