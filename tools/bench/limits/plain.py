"""The plain pipeline against Hugging Face ``generate``: time on a core per token.

Four stages and a draft node on one device do the same work as one process with the whole model,
and besides send every hidden state four times, and wake five processes for every token. Both work
in float32 on one thread each; their tokens must be the same.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from msgspec import Struct

from asyncspec.backend.base import Mode
from asyncspec.core.errors import ClusterError
from asyncspec_nodes.client.client import Client
from asyncspec_nodes.cluster.config import DraftTable, TargetTable
from asyncspec_nodes.local.cluster import LocalCluster, local_config
from tools.bench.limits.cpu_time import cpu_seconds
from tools.bench.limits.progress import Tick
from tools.bench.limits.requests import OPENINGS, ask

STAGES, TOKENS = 4, 96
POLICY = "autoregressive"

GENERATE = """
import json, sys, time
from asyncspec.backend.threads import set_thread_defaults
set_thread_defaults()
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
path, tokens = sys.argv[1], int(sys.argv[2])
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(path)
for line in sys.stdin:
    ids = tokenizer(json.loads(line), return_tensors="pt").input_ids
    settings = dict(do_sample=False, pad_token_id=0, eos_token_id=None)
    with torch.inference_mode():
        model.generate(ids, max_new_tokens=1, **settings)
        start = time.process_time()
        model.generate(ids, max_new_tokens=1, **settings)
        first = time.process_time() - start
        start = time.process_time()
        out = model.generate(ids, max_new_tokens=tokens, **settings)
        whole = time.process_time() - start
    print(json.dumps([(whole - first) / (tokens - 1), out[0, ids.shape[1]:].tolist()]), flush=True)
"""


class PerToken(Struct, frozen=True):
    """Seconds on a core per token, after the first."""

    pipeline: float
    generate: float

    @property
    def ratio(self) -> float:
        return self.pipeline / self.generate


async def measure(target: Path, mode: Mode, tick: Tick) -> PerToken:
    """Every opening with both, interleaved. Raises ``AsyncSpecError``."""
    config = local_config(
        TargetTable(path=str(target), dtype="fp32", mode=mode),
        DraftTable(source="none", policy=POLICY),
        STAGES,
        1,
    )
    pipeline, generate = [], []
    with closing(Whole(target)) as whole:
        async with LocalCluster(config, lambda report: None) as cluster:
            client = await Client.connect(*cluster.address, config.cluster.name)
            try:
                await ask(client, OPENINGS[0], POLICY, 4)  # to warm up
                for opening in OPENINGS:
                    seconds, tokens = await _pipeline(client, cluster.pids, opening)
                    pipeline.append(seconds)
                    # In a thread: a client that is silent for seconds is taken for lost.
                    generate.append(await asyncio.to_thread(whole.per_token, opening, tokens))
                    tick()
            finally:
                await client.close()
    return PerToken(sum(pipeline) / len(OPENINGS), sum(generate) / len(OPENINGS))


async def _pipeline(
    client: Client, pids: Sequence[int], opening: str
) -> tuple[float, tuple[int, ...]]:
    """Seconds on all cores per token after the first, and the tokens."""
    costs = []
    for tokens in (1, TOKENS):
        before = sum(map(cpu_seconds, pids))
        reply = await ask(client, opening, POLICY, tokens)
        costs.append(sum(map(cpu_seconds, pids)) - before)
    return (costs[1] - costs[0]) / (TOKENS - 1), reply.tokens


class Whole:
    """Hugging Face's own ``generate`` in a process of its own, with the whole model."""

    def __init__(self, target: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", GENERATE, str(target), str(TOKENS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()

    def per_token(self, prompt: str, expected: Sequence[int]) -> float:
        """Seconds on a core per token after the first. Raises ``ClusterError`` where the tokens are
        others than those expected."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(prompt) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise ClusterError("generate has failed")
        seconds, tokens = json.loads(line)
        if tokens != list(expected):
            raise ClusterError("generate wrote another text than the pipeline")
        return float(seconds)
