"""A node's process whose device hangs ends and is started again; the text goes on."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from asyncspec_nodes.client.client import ClusterAddress
from asyncspec_nodes.client.engine import ReconnectingEngine
from asyncspec_nodes.local.children import Again, ChildNode
from asyncspec_nodes.local.cluster import LocalCluster, LocalLauncher
from asyncspec_nodes.node.supervisor import RESTARTS
from asyncspec_protocol.links import role_of
from asyncspec_protocol.messages import Finished, Output, Submit
from nodes import hanging_node
from nodes.background import no_process_left, took
from nodes.test_restarts import PROMPT, TOKENS, TOY, config

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(300)]

SECONDS = 1.0


class HangingLauncher(LocalLauncher):
    """One of the nodes, which is a process of its own, hangs once."""

    def __init__(self, victim: int, mark: Path) -> None:
        super().__init__()
        self._victim = victim
        self._mark = mark

    async def start(self, rank: int, log: Path, *, again: Again) -> ChildNode:
        """See ``LocalLauncher``."""
        if rank != self._victim:
            return await super().start(rank, log, again=again)
        script = [sys.executable, str(Path(hanging_node.__file__)), str(self._mark), "60"]
        return await ChildNode.start(
            rank,
            role_of(rank, self._config.stages),
            self._file,
            self._sockets[rank],
            log,
            prefix=script,
            again=again,
        )


@pytest.mark.parametrize(
    ("victim", "name"),
    [(2, "stage 2"), pytest.param(3, "the token source", marks=pytest.mark.nightly)],
)
def test_the_text_goes_on(tmp_path: Path, victim: int, name: str) -> None:
    mark, said = tmp_path / "hung", list[str]()
    whole = config(TOY, apart=victim == 3)
    whole = replace(whole, limits=replace(whole.limits, device_seconds=SECONDS))
    launch = HangingLauncher(victim, mark)
    lost: list[str] = []
    cluster = LocalCluster(
        whole, lambda report: None, tmp_path, launch=launch, restarts=RESTARTS, notify=said.append
    )

    async def ask(client: ReconnectingEngine) -> tuple[Finished, list[int]]:
        tokens: list[int] = []
        async for event in client.ask(Submit(0, PROMPT, TOKENS, 0, 0.0, 0, 1.0, ignore_eos=True)):
            if isinstance(event, Finished):
                return event, tokens
            assert isinstance(event, Output)
            tokens.extend(event.token_ids)
        raise AssertionError("there was no end")

    async def main() -> tuple[Finished, list[int], list[int]]:
        async with cluster:
            where = ClusterAddress(*cluster.address, cluster.config.cluster.name)
            async with ReconnectingEngine(where.connect, waits=True, notify=lost.append) as client:
                end, tokens = await ask(client)
                _, undisturbed = await ask(client)
                return end, tokens, undisturbed

    with no_process_left():
        end, tokens, undisturbed = asyncio.run(main())
    assert mark.exists()
    (line,) = said
    assert line.startswith(f"{name} failed: the device has been busy with one job (")
    assert line.endswith("this node is given up; it is started again")
    assert end.reason == "length"
    assert took(end, 2, tmp_path, lost)
    assert len(tokens) == TOKENS
    assert tokens == undisturbed
