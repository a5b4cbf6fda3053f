"""A node of a local cluster that dies is started again: the text stays the sequential decoder's."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from asyncspec.core.errors import ClusterError
from asyncspec_nodes.client.client import ClusterAddress
from asyncspec_nodes.client.engine import ReconnectingEngine
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.cluster.config import Config, DraftTable, PaceTable, TargetTable
from asyncspec_nodes.local.children import FORKS
from asyncspec_nodes.local.cluster import (
    LocalCluster,
    LocalLauncher,
    local_config,
)
from asyncspec_nodes.node.supervisor import RESTARTS
from asyncspec_protocol.messages import Finished, Output, Submit
from effort import nightly
from nodes.background import no_process_left, took
from nodes.test_processes import generate

PROMPT = "Once upon a time there was a little fox"
TOY = "toy:layers=4,vocab=64,context=8192"
"""It needs no torch."""
TOKENS = 160

pytestmark = [pytest.mark.processes, pytest.mark.torch, pytest.mark.timeout(300)]


def config(target: str = str(BUNDLED_TARGET), *, apart: bool = False) -> Config:
    # An answer must not end before its first tokens have been seen.
    pace = PaceTable(seconds=0.01)
    table, draft = TargetTable(path=target), DraftTable(source="ngram")
    return local_config(table, draft, 2, 2, separate_source=apart, stage_pace=pace)


class KilledCluster:
    """A cluster whose ``victim`` is killed when the first text is there."""

    def __init__(
        self,
        victim: int,
        restarts: int,
        logs: Path,
        *,
        target: str = str(BUNDLED_TARGET),
        apart: bool = False,
        forks: bool = FORKS,
    ) -> None:
        self.said: list[str] = []
        # Why the client lost its draft node, each time.
        self.lost: list[str] = []
        self.tokens: list[int] = []
        self.victim = victim
        self.cluster = LocalCluster(
            config(target, apart=apart),
            lambda report: None,
            launch=LocalLauncher(forks=forks),
            restarts=restarts,
            notify=self.said.append,
            logs=logs,
        )
        self._logs = logs

    async def ask(self) -> Finished:
        """The whole answer."""
        where = ClusterAddress(*self.cluster.address, self.cluster.config.cluster.name)
        submit = Submit(0, PROMPT, TOKENS, 0, 0.0, 0, 1.0, ignore_eos=True)
        self.tokens = []
        async with ReconnectingEngine(where.connect, notify=self.lost.append) as engine:
            async for event in engine.ask(submit):
                if isinstance(event, Finished):
                    return event
                assert isinstance(event, Output)
                self.kill()
                self.tokens.extend(event.token_ids)
        raise AssertionError("there was no end")

    def took(self, end: Finished, sessions: int) -> bool:
        """See ``background.took``."""
        return took(end, sessions, self._logs, self.lost)

    def kill(self) -> None:
        """Once."""
        if self.victim >= 0:
            os.kill(self.cluster.pids[self.victim], signal.SIGKILL)
            self.victim = -1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "name", "sessions"), [nightly(2, "stage 2", 2), (0, "the draft node", 1)]
)
def test_the_text_goes_on(victim: int, name: str, sessions: int, tmp_path: Path) -> None:
    asked = KilledCluster(victim, RESTARTS, tmp_path)

    async def main() -> Finished:
        async with asked.cluster:
            return await asked.ask()

    with no_process_left():
        end = asyncio.run(main())
    assert asked.said == [f"{name} was killed by SIGKILL; it is started again"]
    assert end.reason == "length"
    assert asked.took(end, sessions)
    assert end.stats["new_tokens"] == TOKENS
    assert asked.tokens == generate(BUNDLED_TARGET, PROMPT, TOKENS)[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("victim", "name", "apart", "forks"),
    [(2, "stage 2", False, False), (3, "the token source", True, FORKS)],
)
def test_the_text_is_that_of_an_undisturbed_answer(
    victim: int, name: str, apart: bool, forks: bool, tmp_path: Path
) -> None:
    asked = KilledCluster(victim, RESTARTS, tmp_path, target=TOY, apart=apart, forks=forks)

    async def main() -> tuple[Finished, list[int], Finished]:
        async with asked.cluster:
            return await asked.ask(), asked.tokens, await asked.ask()

    with no_process_left():
        end, tokens, undisturbed = asyncio.run(main())
    assert asked.said == [f"{name} was killed by SIGKILL; it is started again"]
    assert asked.took(end, 2)
    assert asked.took(undisturbed, 1)
    assert len(tokens) == TOKENS
    assert tokens == asked.tokens


def test_a_node_that_dies_too_often_ends_the_cluster(tmp_path: Path) -> None:
    """While it has no request: nobody's request is the reason then."""
    asked = KilledCluster(-1, 1, tmp_path, target=TOY)

    async def main() -> ClusterError:
        async with asked.cluster:
            for _ in range(2):
                await asked.ask()  # it is back then
                # Its report is read by another task.
                while any(child.in_hand for child in asked.cluster._children):  # noqa: ASYNC110
                    await asyncio.sleep(0)
                asked.victim = 1
                asked.kill()
            error = await asked.cluster.watch()
            assert isinstance(error, ClusterError)
            return error

    with no_process_left():
        error = asyncio.run(main())
    assert str(error) == "stage 1 was killed by SIGKILL after 1 new starts within 600 s"
    assert asked.said == ["stage 1 was killed by SIGKILL; it is started again"]


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "name"), [(1, "stage 1"), (0, "the draft node")])
def test_requests_that_end_a_node_do_not_end_the_cluster(
    victim: int, name: str, tmp_path: Path
) -> None:
    """However many of them there are."""
    asked = KilledCluster(victim, 1, tmp_path, target=TOY)

    async def main() -> None:
        async with asked.cluster:
            for _ in range(2):
                asked.victim = victim
                assert (await asked.ask()).reason == "length"

    with no_process_left():
        asyncio.run(main())
    assert asked.said == 2 * [f"{name} was killed by SIGKILL; it is started again"]
