"""Many requests on one cluster of real processes: each gets just what it would get alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec
import pytest

from asyncspec.trace.file import read_trace
from asyncspec.trace.records import Issued, Step
from asyncspec_nodes.client.client import Client
from asyncspec_nodes.client.engine import ReconnectingEngine
from asyncspec_nodes.cluster.checkpoints import BUNDLED_EAGLE, BUNDLED_TARGET
from asyncspec_nodes.cluster.config import DraftTable, TargetTable, TraceTable
from asyncspec_nodes.local.cluster import local_config
from asyncspec_protocol.messages import Finished, Output, Submit
from nodes.background import Background

pytestmark = [pytest.mark.processes, pytest.mark.torch]

PROMPTS = (
    "Once upon a time there was a little fox",
    "The",
    "A long, long time ago, in a village by the sea, lived an old man who had three daughters. "
    * 3,
    "Every morning the baker",
)
POLICIES = ("flowspec", "specpipe", "chain", "autoregressive", "pipedec:width=8")
WAVES = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[Background]:
    config = local_config(
        TargetTable(path=str(BUNDLED_TARGET)), DraftTable(source=f"eagle:{BUNDLED_EAGLE}"), 2, 16
    )
    background = Background(msgspec.structs.replace(config, trace=TraceTable(events=200_000)))
    yield background
    background.close()


def mixed(random: Random) -> Submit:
    """A request like those of a service: of any kind."""
    sampled = random.random() < 0.5
    return Submit(
        request=0,
        prompt=random.choice(PROMPTS),
        max_new_tokens=random.randint(1, 40),
        seed=random.randrange(100),
        temperature=0.9 if sampled else 0.0,
        top_k=0,
        top_p=0.95 if sampled else 1.0,
        policy=random.choice(POLICIES),
        repetition_penalty=random.choice((1.0, 1.0, 1.3)),
        log_probs=random.random() < 0.3,
    )


async def answer(
    client: Client | ReconnectingEngine, submit: Submit, at_most: int = 10**6
) -> list[object]:
    """Tokens and log-probabilities; one that is left after ``at_most`` messages is cancelled."""
    said: list[object] = []
    events = client.ask(submit)
    async for event in events:
        if isinstance(event, Output):
            said += [*zip(event.token_ids, event.token_log_probs or event.token_ids, strict=True)]
        elif isinstance(event, Finished):
            assert event.reason in ("stop", "length")
        at_most -= 1
        if not at_most:
            break
    await events.aclose()
    return said


async def together(where: tuple[str, int], name: str, random: Random) -> None:
    """1 to 16 requests that come while others run; some are left. Then each alone."""
    # On busy cores a client may be so late that it is given up: it comes back.
    async with ReconnectingEngine(lambda: Client.connect(*where, name), waits=True) as client:
        asked = [mixed(random) for _ in range(random.randint(1, 16))]
        left = {i: random.randint(1, 4) for i in range(len(asked)) if random.random() < 0.25}
        tasks: list[asyncio.Task[list[object]]] = []
        for i, submit in enumerate(asked):
            tasks.append(asyncio.create_task(answer(client, submit, left.get(i, 10**6))))
            if random.random() < 0.4:  # the next one comes when some request has ended
                await asyncio.wait(tasks[-2:], return_when=asyncio.FIRST_COMPLETED)
        answers = await asyncio.gather(*tasks)
        for i, submit in enumerate(asked):
            alone = await answer(client, submit)
            assert answers[i] == (alone[: len(answers[i])] if i in left else alone)
        idle = await client.nodes()
        assert [node.sessions for node in idle] == [0] * len(idle)
        assert [node.slots for node in idle] == [0] * len(idle)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(WAVES))
def test_many_equal_each_alone(cluster: Background, seed: int) -> None:
    asyncio.run(together(cluster.cluster.address, cluster.name, Random(seed)))


def test_sessions_share_passes(
    cluster: Background, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Else the test above would say nothing."""

    async def run() -> None:
        where = *cluster.cluster.address, cluster.name
        submit = msgspec.structs.replace(mixed(Random(0)), max_new_tokens=40, policy="flowspec")
        async with ReconnectingEngine(lambda: Client.connect(*where), waits=True) as client:
            await asyncio.gather(*(answer(client, submit) for _ in range(6)))

    asyncio.run(run())
    path = tmp_path / "trace"
    code, _, _ = cluster.command(capsys, "record", "--last", "60", str(path))
    assert code == 0
    steps = [line for line in read_trace(path).lines if isinstance(line, Step)]
    for rank in (1, 2):
        issued = [e for s in steps if s.rank == rank for e in s.effects if isinstance(e, Issued)]
        assert any(len(effect.parts) > 2 for effect in issued)
