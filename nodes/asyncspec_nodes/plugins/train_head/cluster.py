"""A running cluster's answers with its target's hidden states: several requests at a time, which
fill its pipeline without drafts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AsyncExitStack
from itertools import islice

import numpy as np
from msgspec import Struct

from asyncspec.actor.inbox import Event
from asyncspec.backend.feature_shards import Bits, Collected, bfloat16_bits
from asyncspec.core.errors import ClusterError, UserError
from asyncspec.core.tensors import WireTensor
from asyncspec_nodes.client.client import ClusterAddress
from asyncspec_nodes.client.engine import ReconnectingEngine
from asyncspec_nodes.plugins.train_head.answers import Sample
from asyncspec_protocol.clients import BREAKS, NODE_FAILURES
from asyncspec_protocol.messages import FINAL, Finished, Output, Submit

POLICY = "autoregressive"

TICK = 1.0
"""Seconds between reports where no answer ends."""


NO_FEATURES = (
    "the cluster sends no hidden states: its nodes are of an older version; update them, or leave "
    "out --config and --connect"
)
"""A draft node that does not know ``Submit.features`` answers without them."""


class _Answer:
    """A sample being answered."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.tokens = [*sample.prompt]
        self.rows: list[Bits] = []

    def submit(self, depths: tuple[int, ...]) -> Submit:
        sample = self.sample
        return Submit(
            *(0, "", sample.tokens, sample.seed, sample.temperature, 0, 1.0),
            policy=POLICY,
            prompt_ids=sample.prompt,
            features=(*depths, FINAL),
        )

    def take(self, start: int, tensor: WireTensor) -> None:
        """Rows of the positions from ``start`` on, some of them again after a break."""
        del self.rows[start:]
        self.rows.extend(bfloat16_bits(tensor).copy())

    def write(self, tokens: Sequence[int]) -> None:
        """Go on with ``tokens``. Hidden states come right behind the first ones: raises
        ``UserError`` where others follow and there are none, rather than at the end of a slow
        answer."""
        if len(self.tokens) > len(self.sample.prompt) and tokens and not self.rows:
            raise UserError(NO_FEATURES)
        self.tokens += tokens

    @property
    def collected(self) -> Collected:
        """All tokens but the last. Raises ``UserError``."""
        sample, count = self.sample, len(self.tokens) - 1
        if len(self.rows) < count:
            raise UserError(NO_FEATURES)
        features = np.stack(self.rows[:count])
        return Collected(sample.number, self.tokens[:count], len(sample.prompt), features)


class ClusterAnswers(Struct, frozen=True):
    """The running cluster at an address.

    Arguments:
        fingerprint: of its target, as in ``OpenModel``; empty: not compared.
        sessions: answers at a time.
        notify: takes a line for each loss of the draft node.
    """

    address: ClusterAddress
    fingerprint: str
    sessions: int
    notify: Callable[[str], None]

    def __call__(
        self,
        depths: tuple[int, ...],
        samples: Iterator[Sample],
        between: Callable[[int], None],
        refused: Callable[[Sample], None],
    ) -> Generator[Collected]:
        """Answers as they are done. ``between`` is called now and then with the tokens drawn since;
        ``refused`` with what the cluster cannot hold. Raises ``ClusterError`` and ``UserError``."""
        drawn = 0

        async def answer(engine: ReconnectingEngine, sample: Sample) -> Collected | None:
            nonlocal drawn
            current = _Answer(sample)
            event: Event | None = None
            async for event in engine.ask(current.submit(depths), current.take):
                if isinstance(event, Output):
                    current.write(event.token_ids)
                    drawn += len(event.token_ids)
            assert isinstance(event, Finished)
            if event.reason != "error":
                return current.collected
            if event.code in (*NODE_FAILURES, BREAKS):
                raise ClusterError(event.detail)
            refused(sample)
            return None

        running: set[asyncio.Task[Collected | None]] = set()
        with asyncio.Runner() as runner:
            stack = AsyncExitStack()
            try:
                engine = runner.run(self._connect(stack))
                # Before the engine is closed.
                stack.push_async_callback(_cancel, running)
                while True:
                    for sample in islice(samples, self.sessions - len(running)):
                        running.add(runner.get_loop().create_task(answer(engine, sample)))
                    if not running:
                        return
                    done = runner.run(_wait(running))
                    between(drawn)
                    drawn = 0
                    for task in done:
                        if (collected := task.result()) is not None:
                            yield collected
                    running -= done
            finally:
                runner.run(stack.aclose())

    async def _connect(self, stack: AsyncExitStack) -> ReconnectingEngine:
        engine = ReconnectingEngine(self.address.connect, waits=True, notify=self.notify)
        await stack.enter_async_context(engine)
        where = f"{self.address.host}:{self.address.port}"
        if self.fingerprint not in ("", engine.client.welcome.fingerprint):
            raise UserError(
                f"the cluster at {where} has another target than --target; give the same files"
            )
        return engine


async def _wait(
    running: set[asyncio.Task[Collected | None]],
) -> set[asyncio.Task[Collected | None]]:
    """Those that are done, after a second at most."""
    done, _ = await asyncio.wait(running, timeout=TICK, return_when=asyncio.FIRST_COMPLETED)
    return done


async def _cancel(running: set[asyncio.Task[Collected | None]]) -> None:
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
