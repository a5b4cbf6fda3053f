"""vLLM's pipeline beside ours on equally paced stages: SpecPipe's Figures 16 and 17.

Both have one process for each stage, whose passes take the same time for the same rows. For every
number of requests at a time each has its turn, with the same prompts; every text is compared with
the plain target's, token by token. vLLM is asked over HTTP, ours by our client: what HTTP costs is
far below a pass.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.errors import ClusterError
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.cluster.config import PaceTable
from tools.bench.limits.progress import Tick
from tools.bench.limits.requests import WARM_UP_TOKENS, ask
from tools.bench.peers import vllm
from tools.bench.serving import padded
from tools.bench.serving.load import Load, steady
from tools.bench.serving.padded import DRAFT_PACE, REQUESTS, RUNNING, STAGE_PACE, STAGES, Texts
from tools.bench.serving.pool import through
from tools.bench.serving.prompts import opening
from tools.bench.serving.vllm_server import Server

TOKENS = {"autoregressive": 24, "flowspec": 64, "specpipe": 64, "flow": 64}
"""New tokens an answer, by our policy."""
VLLM, VLLM_TOKENS = "PP-vLLM", 24
WORKER_FOLDER = Path(__file__).parent.parent / "peers" / "vllm_worker"
"""vLLM's interpreter imports the paced worker from there."""


class Beside(Struct, frozen=True):
    """What all of them have given, in seconds: loads by vLLM or policy, by requests at a time."""

    loads: dict[str, tuple[Load, ...]]


async def measure(
    python: Path,
    tick: Tick,
    *,
    running: Sequence[int] = RUNNING,
    tokens: Mapping[str, int] = TOKENS,
    stages: int = STAGES,
    stage_pace: PaceTable = STAGE_PACE,
) -> Beside:
    """``python``: an interpreter that has vLLM. Raises ``AsyncSpecError``, also where a text is not
    the target's."""
    texts = await padded.target_texts(max(running) * REQUESTS, max(tokens.values()))
    tick()
    bed = padded.bed(stages, stage_pace=stage_pace, draft_pace=DRAFT_PACE)
    bed = replace(bed, limits=replace(bed.limits, sessions=max(running)))
    loads: dict[str, list[Load]] = {name: [] for name in (VLLM, *tokens)}
    async with AsyncExitStack() as stack:
        served = await Pipeline.start(python, stages, stage_pace, max(running), stack)
        client = await padded.connected(stack, bed)
        await served.times(opening(0), WARM_UP_TOKENS, texts[0])
        for policy in tokens:
            await ask(client, opening(0), policy, WARM_UP_TOKENS)
        for count in running:
            loads[VLLM].append(await served.load(count, texts))
            tick()
            for policy, length in tokens.items():
                answers = await padded.pool_replies(client, policy, length, count, texts)
                loads[policy].append(steady([reply.times for reply in answers], count))
                tick()
    return Beside({name: tuple(series) for name, series in loads.items()})


class Pipeline:
    """vLLM with a process for each stage."""

    def __init__(self, server: Server) -> None:
        self._server = server

    @classmethod
    async def start(
        cls, python: Path, stages: int, pace: PaceTable, sequences: int, stack: AsyncExitStack
    ) -> Pipeline:
        """It ends with ``stack``; it runs at most ``sequences`` requests at a time. Raises
        ``AsyncSpecError``."""
        kind = vllm.Kind(
            "pipeline",
            (
                *("--pipeline-parallel-size", str(stages), "--max-num-seqs", str(sequences)),
                *("--worker-cls", "paced_worker.PacedWorker"),
            ),
            stages,
        )
        paced = {
            "PYTHONPATH": str(WORKER_FOLDER),
            "PACED_WORKER": json.dumps([pace.seconds, pace.plateau, pace.row_seconds]),
        }
        return cls(await Server.start(python, BUNDLED_TARGET, kind, "float32", stack, paced))

    async def load(self, running: int, texts: Texts) -> Load:
        """So many requests at a time. Raises ``ClusterError`` where a text is not the target's."""

        async def times(number: int) -> Sequence[float]:
            return await self.times(opening(number), VLLM_TOKENS, texts[number])

        return steady(await through(REQUESTS * running, running, times), running)

    async def times(self, prompt: str, tokens: int, text: Sequence[int]) -> Sequence[float]:
        """When each token of an answer came, by ``time.monotonic``. Raises ``ClusterError`` where
        the answer is not how ``text`` begins."""
        answer = await self._server.answer(prompt, tokens)
        if answer.tokens != tuple(text[:tokens]):
            raise ClusterError(f"vLLM wrote another text than the plain target for {prompt!r}")
        return answer.times
