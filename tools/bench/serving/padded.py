"""The padded bed in real processes: stages that wait for most of a fixed time, and many requests.

Two clusters take turns: one whose requests share passes, and one that works on one request at a
time and knows no sharing. Every text is compared with the plain target's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.errors import ClusterError
from asyncspec_nodes.client.client import Client
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.cluster.config import Config, DraftTable, PaceTable, TargetTable
from asyncspec_nodes.local.cluster import LocalCluster, local_config
from tools.bench.limits.models import EAGLE_HEAD
from tools.bench.limits.progress import Tick
from tools.bench.limits.requests import WARM_UP_TOKENS, Reply, ask, speed
from tools.bench.serving.load import Load, steady
from tools.bench.serving.pool import through
from tools.bench.serving.prompts import opening

STAGES = 4
STAGE_PACE = PaceTable(seconds=0.080, plateau=64, row_seconds=0.0002)
DRAFT_PACE = PaceTable(level_seconds=0.010)
RUNNING = (1, 2, 4, 8, 16, 32)
TOKENS = {"autoregressive": 24, "flowspec": 64, "specpipe": 64}
"""New tokens an answer, by policy."""
REQUESTS = 2
"""For each place."""

Texts = Sequence[tuple[int, ...]]


class Padded(Struct, frozen=True):
    """What the bed has given, in seconds."""

    # By policy: of requests that share passes, by how many run.
    shared: dict[str, tuple[Load, ...]]
    # By policy: of a cluster that works on one request at a time.
    alone: dict[str, Load]
    # By policy: tokens a second of one request where passes could be shared, over those where
    # they cannot.
    single: dict[str, float]


def bed(
    stages: int = STAGES,
    *,
    stage_pace: PaceTable | None = None,
    draft_pace: PaceTable | None = None,
) -> Config:
    """A cluster file: the bundled pair with its EAGLE head."""
    target, draft = TargetTable(path=str(BUNDLED_TARGET)), DraftTable(source=EAGLE_HEAD)
    return local_config(target, draft, stages, 1, stage_pace=stage_pace, draft_pace=draft_pace)


async def measure(
    tick: Tick,
    *,
    running: Sequence[int] = RUNNING,
    tokens: Mapping[str, int] = TOKENS,
    stages: int = STAGES,
    stage_pace: PaceTable = STAGE_PACE,
) -> Padded:
    """All policies. Raises ``AsyncSpecError``, also where a text is not the target's."""
    texts = await target_texts(max(running) * REQUESTS, max(tokens.values()))
    tick()
    one = bed(stages, stage_pace=stage_pace, draft_pace=DRAFT_PACE)
    limits = one.limits
    configs = (
        replace(one, limits=replace(limits, sessions=max(running))),
        replace(one, limits=replace(limits, sessions=1, batch_rows=1)),
    )
    async with AsyncExitStack() as stack:
        several, single = [await connected(stack, config) for config in configs]
        for policy in tokens:
            for client in (several, single):
                await ask(client, opening(0), policy, WARM_UP_TOKENS)
        alone, ratios = await _one_by_one(several, single, tokens, texts, tick)
        shared: dict[str, tuple[Load, ...]] = {}
        for policy, most in tokens.items():
            loads = []
            for count in running:
                replies = await pool_replies(several, policy, most, count, texts)
                loads.append(steady([reply.times for reply in replies], count))
                tick()
            shared[policy] = tuple(loads)
    return Padded(shared, alone, ratios)


async def target_texts(pool: int, tokens: int) -> Texts:
    """The plain target's, without speculation and one at a time, on stages that do not wait."""
    async with AsyncExitStack() as stack:
        client = await connected(stack, bed(1))
        return [
            (await ask(client, opening(number), "autoregressive", tokens)).tokens
            for number in range(pool)
        ]


async def connected(stack: AsyncExitStack, config: Config) -> Client:
    """A client of a cluster that runs until ``stack`` ends."""
    cluster = await stack.enter_async_context(LocalCluster(config, lambda report: None))
    client = await Client.connect(*cluster.address, cluster.config.cluster.name)
    stack.push_async_callback(client.close)
    return client


async def _one_by_one(
    several: Client, single: Client, tokens: Mapping[str, int], texts: Texts, tick: Tick
) -> tuple[dict[str, Load], dict[str, float]]:
    """The single-request path: its load, and how the other cluster's one request compares. The
    clusters take turns, request by request."""
    alone: dict[str, Load] = {}
    ratios: dict[str, float] = {}
    for policy, most in tokens.items():
        pairs = []
        for number in range(2 * REQUESTS):
            # The first of a turn is second in the next.
            clients = (several, single) if number % 2 else (single, several)
            pair = {c: await _checked(c, number % len(texts), policy, most, texts) for c in clients}
            pairs.append((pair[several], pair[single]))
            tick()
        with_sharing, without = zip(*pairs, strict=True)
        alone[policy] = steady(_one_after_another(without), 1)
        ratios[policy] = speed(with_sharing).tokens_per_second / speed(without).tokens_per_second
    return alone, ratios


def _one_after_another(replies: Sequence[Reply]) -> list[list[float]]:
    """Times of the tokens, had nothing been between the requests. The first comes at time 0."""
    found: list[list[float]] = []
    for reply in replies:
        first = found[-1][-1] + reply.stats["first_token_seconds"] if found else 0.0
        found.append([first + time - reply.times[0] for time in reply.times])
    return found


async def pool_replies(
    client: Client, policy: str, tokens: int, running: int, texts: Texts
) -> list[Reply]:
    """Of a pool of requests, so many at a time."""

    async def one(number: int) -> Reply:
        return await _checked(client, number, policy, tokens, texts)

    return await through(REQUESTS * running, running, one)


async def _checked(client: Client, number: int, policy: str, tokens: int, texts: Texts) -> Reply:
    """An answer that is the target's. Raises ``ClusterError`` where it is not."""
    reply = await ask(client, opening(number), policy, tokens)
    if reply.tokens != texts[number][:tokens]:
        raise ClusterError(
            f"request {number} with {policy} has not got the plain target's text: this is a bug"
        )
    return reply
