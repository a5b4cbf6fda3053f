"""Our policies, on real node processes, one on each device of a bed."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from pathlib import Path

from asyncspec.source.registry import EAGLE_PREFIX
from asyncspec_nodes.client.client import Client
from asyncspec_nodes.cluster.checkpoints import NGRAM
from asyncspec_nodes.cluster.config import DraftTable, PaceTable, TargetTable
from asyncspec_nodes.local.cluster import local_config
from tools.bench.limits.requests import ask
from tools.bench.peers.comparison import Comparison, Source
from tools.bench.peers.peer import Answer
from tools.testbed.bed import Bed
from tools.testbed.cluster import BedCluster


class Ours:
    """One policy of a running cluster. ``exact``: as in ``Peer``."""

    def __init__(
        self, client: Client, name: str, policy: str, cores: float | None, *, exact: bool
    ) -> None:
        self.name = name
        self.cores = cores
        self.exact = exact
        self._client = client
        self._policy = policy

    async def answer(self, prompt: str, tokens: int) -> Answer:
        """See ``Peer``. The client is on the host, outside every quota; it computes nothing."""
        start = time.perf_counter()
        reply = await ask(self._client, prompt, self._policy, tokens)
        seconds = time.perf_counter() - start
        return Answer(len(reply.tokens), seconds, token_ids=reply.tokens)


async def start(
    comparison: Comparison,
    target: Path,
    draft: Path,
    bed: Bed,
    stack: AsyncExitStack,
    source: Source,
) -> list[Ours]:
    """Start a cluster, of safetensors or GGUF files, which ends with ``stack``. Raises
    ``AsyncSpecError``."""
    gguf, device = target.suffix == ".gguf", comparison.device
    dtype, quantize = comparison.dtype, comparison.quantize
    model = f"{EAGLE_PREFIX}{comparison.head}" if source.head else str(draft)
    seconds = comparison.stage_seconds
    config = local_config(
        TargetTable(path=str(target), mode=comparison.mode, device=device)
        if gguf
        else TargetTable(
            path=str(target), mode=comparison.mode, dtype=dtype, quantize=quantize, device=device
        ),
        DraftTable(source=f"{model}+{NGRAM}" if source.lookup else model),
        comparison.stages,
        1,
        stage_pace=PaceTable(seconds=seconds) if seconds else None,
    )
    cluster = await stack.enter_async_context(BedCluster(bed, config, lambda report: None))
    client = await Client.connect(*cluster.address, config.cluster.name)
    stack.push_async_callback(client.close)
    cores = comparison.all_cores if bed.limited else None
    name, exact = ("ours (llama)", False) if gguf else ("ours", comparison.exact)
    return [
        Ours(client, f"{name}: {policy}{source.name}", policy, cores, exact=exact)
        for policy in source.policies
    ]
