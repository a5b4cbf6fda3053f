"""Asking a running cluster, and what its answers say of speed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack

from msgspec import Struct

from asyncspec.core.errors import ClusterError
from asyncspec_nodes.client.client import Client
from asyncspec_nodes.local.cluster import LocalCluster
from asyncspec_protocol.messages import Finished, Output, Submit
from tools.bench.limits.progress import Tick

OPENINGS = (
    "Once upon a time there was a little fox who lived in a big forest. One day, the fox",
    "def mean(values):\n    total = 0\n    for value in values:\n",
    "Tom has 3 boxes with 12 apples each. He gives 7 apples to his sister. How many apples",
)
"""Three kinds of text that the bundled models have seen: a story, code, arithmetic."""

WARM_UP_TOKENS = 8


class Speed(Struct, frozen=True):
    """What some answers of one policy have cost, prompt processing left out."""

    tokens: float
    turns: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_turn(self) -> float:
        return self.tokens / self.turns

    @property
    def turn_seconds(self) -> float:
        return self.seconds / self.turns


class Reply(Struct, frozen=True):
    """An answer's tokens and its statistics (docs/reference/metrics.md)."""

    tokens: tuple[int, ...]
    stats: dict[str, float]
    # When each token came, by ``time.monotonic``.
    times: tuple[float, ...] = ()


def greedy(policy: str, tokens: int, prompt: str = "", token_ids: Sequence[int] = ()) -> Submit:
    """A request for just so many tokens to a prompt, given as text or as token ids."""
    return Submit(
        request=0,
        prompt=prompt,
        prompt_ids=tuple(token_ids),
        max_new_tokens=tokens,
        seed=0,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        policy=policy,
        ignore_eos=True,
    )


async def ask(client: Client, prompt: str, policy: str, tokens: int) -> Reply:
    """One greedy answer of just so many tokens. Raises ``ClusterError``."""
    submit = greedy(policy, tokens, prompt)
    ids: list[int] = []
    times: list[float] = []
    async for event in client.ask(submit):
        match event:
            case Output(token_ids=more):
                ids.extend(more)
                times.extend([time.monotonic()] * len(more))
            case Finished(reason="error", detail=detail):
                raise ClusterError(detail)
            case Finished(stats=stats):
                return Reply(tuple(ids), stats, tuple(times))
    raise AssertionError("an answer ends with Finished")


def speed(replies: Iterable[Reply]) -> Speed:
    """All of them together."""
    sums: Counter[str] = Counter()
    for reply in replies:
        sums.update(reply.stats)
        sums["decoded"] += int(reply.stats["new_tokens"]) - 1
    return Speed(sums["decoded"], sums["turns"], sums["decode_seconds"])


async def turn_about(
    clusters: Mapping[str, LocalCluster],
    tokens: Mapping[str, int],
    tick: Tick,
    prompts: Sequence[str] = OPENINGS,
) -> dict[str, dict[str, list[Reply]]]:
    """Every prompt with every policy on every cluster, interleaved; so many new tokens a policy.
    By cluster and policy, in the prompts' order. Raises ``ClusterError``, also where the texts
    differ."""
    replies: dict[str, dict[str, list[Reply]]] = {n: {p: [] for p in tokens} for n in clusters}
    async with AsyncExitStack() as stack:
        clients = {}
        for name, cluster in clusters.items():
            client = await Client.connect(*cluster.address, cluster.config.cluster.name)
            stack.push_async_callback(client.close)
            clients[name] = client
            for policy in tokens:
                await ask(client, prompts[0], policy, WARM_UP_TOKENS)
        for prompt in prompts:
            several = []
            for policy, most in tokens.items():
                for name, client in clients.items():
                    reply = await ask(client, prompt, policy, most)
                    replies[name][policy].append(reply)
                    several.append(reply.tokens[: min(tokens.values())])
                    tick()
            if len(set(several)) > 1:
                raise ClusterError("two ways to the same answer have led to different texts")
    return replies
