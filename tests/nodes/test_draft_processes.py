"""Six draft nodes as real processes on two stages that list none of them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest

from asyncspec.core.errors import ClusterError
from asyncspec_nodes.cli import main as cli
from asyncspec_nodes.client.client import Client
from asyncspec_nodes.client.engine import ReconnectingEngine
from asyncspec_nodes.cluster.checkpoints import BUNDLED_DRAFT, BUNDLED_TARGET
from asyncspec_nodes.cluster.config import DraftTable, TargetTable
from asyncspec_nodes.cluster.file import to_toml
from asyncspec_nodes.local.cluster import local_config
from asyncspec_nodes.node.cli import TUNABLES, huge_page_environment
from asyncspec_nodes.node.reports import FailureReport, ReadyReport, read_report
from asyncspec_protocol.ids import draft_rank
from asyncspec_protocol.messages import Finished, Output, Status, Submit
from nodes.background import START, Background, given_up, no_process_left
from nodes.test_processes import generate
from shared_fork_server import execute_node, start_node
from tools.testbed.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.torch]

TOKENS = 20
# What proposes tokens at each of them; None: what the cluster file says.
SOURCES = (None, "ngram", "eagle:", "hybrid", "ngram", None)
PROMPTS = (
    "Once upon a time there was a little fox",
    "Tom and Lily went to the park. They saw",
    "The cat sat",
    "One day, a boy named Ben found a big",
    "def add(a, b):",
    "Mia liked to sing. Every day she",
)


class DraftNode:
    """``asyncspec-node --role draft`` with a port of its own; ``executed``: not forked."""

    def __init__(
        self, number: int, file: Path, source: str | None, *, executed: bool = False
    ) -> None:
        self.port = free_port()
        argv = ["--role", "draft", "--rank", str(number), "--config", str(file), "--supervised"]
        argv += ["--listen", f"127.0.0.1:{self.port}"]
        argv += [] if source is None else ["--source", source]
        self._log = (file.parent / f"draft-{number}.log").open("wb")
        self.process = (execute_node if executed else start_node)(argv, self._log)

    def wait(self) -> None:
        """Until it serves."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            report = read_report(line)
            assert not isinstance(report, FailureReport), report.text
            if isinstance(report, ReadyReport):
                return
        raise AssertionError(f"it has ended with code {self.process.wait(START)}")

    def close(self) -> None:
        """The end of its stdin is its own."""
        self.process.communicate(timeout=START)
        self._log.close()


class Shared:
    """Two stages and draft nodes, the first ``executed`` of which are not forked; ``apart``: also a
    node for the source that they share."""

    def __init__(
        self,
        folder: Path,
        sources: Sequence[str | None],
        *,
        apart: bool = False,
        executed: int = 0,
    ) -> None:
        target, guess = TargetTable(path=str(BUNDLED_TARGET)), DraftTable(source=str(BUNDLED_DRAFT))
        config = local_config(target, guess, 2, 2, separate_source=apart)
        stages = tuple(node for node in config.node if node.rank)
        self._folder = folder
        # Log lines of links that were given up as silent.
        self._lost = 0
        self.background = Background(msgspec.structs.replace(config, node=stages), folder)
        self.cluster = self.background.name
        file = folder / "cluster.toml"
        file.write_text(to_toml(self.background.cluster.config))
        self.drafts = [
            DraftNode(number, file, source, executed=number < executed)
            for number, source in enumerate(sources)
        ]
        for draft in self.drafts:
            draft.wait()
        # Of the last answer of each.
        self.tokens: dict[int, list[int]] = {}
        # Whose client was late and reconnected: what its last answer says is of the rest.
        self.late: set[int] = set()

    async def ask(
        self,
        number: int,
        prompt: str,
        count: int,
        seen: asyncio.Event,
        policy: str = "",
        *,
        doomed: bool = False,
    ) -> Finished:
        """The end of an answer; its tokens go to ``tokens``. ``seen``: there are some. ``doomed``:
        raises ``ClusterError`` where the draft node ends."""
        connect = partial(Client.connect, "127.0.0.1", self.drafts[number].port, self.cluster)
        waiting = ReconnectingEngine(connect, waits=True, notify=lambda line: self.late.add(number))
        self.tokens[number] = []
        self.late.discard(number)
        async with await connect() if doomed else waiting as client:
            async for event in client.ask(submit(prompt, count, policy)):
                if isinstance(event, Finished):
                    return event
                assert isinstance(event, Output)
                self.tokens[number].extend(event.token_ids)
                seen.set()
        raise AssertionError("there was no end")

    async def nodes(self, number: int) -> tuple[Status, ...]:
        """How the nodes are, as one of the draft nodes says."""
        client = await Client.connect("127.0.0.1", self.drafts[number].port, self.cluster)
        try:
            return await client.nodes()
        finally:
            await client.close()

    def undisturbed(self, ends: Sequence[Finished]) -> bool:
        """Whether answers took one session each, unless a node was so late that it was given up
        since the last time: other programs may keep the cores busy."""
        lost = given_up(self._folder)
        late, self._lost = lost > self._lost, lost
        return late or [end.stats["sessions"] for end in ends] == [1] * len(ends)

    def drafted(self, ends: Sequence[Finished]) -> bool:
        """Whether there were drafts for every answer, of these that the first draft nodes gave; of
        one whose client was late only the rest is known."""
        drafted = {n for n, end in enumerate(ends) if end.stats["drafted_nodes"] > 0}
        return drafted | self.late >= set(range(len(ends)))

    def close(self) -> None:
        for draft in self.drafts:
            draft.close()
        self.background.close()


def submit(prompt: str, count: int, policy: str = "") -> Submit:
    return Submit(0, prompt, count, 0, 0.0, 0, 1.0, policy=policy, ignore_eos=True)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    with no_process_left():
        found = Shared(tmp_path_factory.mktemp("shared"), SOURCES, executed=1)
        yield found
        found.close()


def test_weights_are_on_huge_pages_where_they_can_be_had(shared: Shared) -> None:
    """Of nodes that are started by themselves, and of those that are forked."""
    alone = psutil.Process(shared.drafts[0].process.pid)
    # Its children have another title in the place of their environment.
    forked_from = psutil.Process(shared.background.cluster.pids[0]).parent()
    assert forked_from is not None
    wanted = huge_page_environment(os.environ).get(TUNABLES)
    assert [x.environ().get(TUNABLES) for x in (alone, forked_from)] == [wanted, wanted]


def test_each_of_six_gets_the_text_it_would_get_alone(shared: Shared) -> None:
    async def main() -> None:
        seen = asyncio.Event()
        # The default policy may draft nothing where other programs keep a source waiting.
        ends = await asyncio.gather(
            *(shared.ask(n, prompt, TOKENS, seen, "flowspec") for n, prompt in enumerate(PROMPTS))
        )
        assert [end.reason for end in ends] == ["length"] * 6
        # They worked, and nobody disturbed them.
        assert shared.undisturbed(ends)
        assert shared.drafted(ends)

    asyncio.run(main())
    for number, prompt in enumerate(PROMPTS):
        assert shared.tokens[number] == generate(BUNDLED_TARGET, prompt, TOKENS)[0]


def test_a_running_cluster_says_what_is_planned(
    shared: Shared, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of users who are in the middle of long answers; whichever draft node is asked."""
    where = ["--connect", f"127.0.0.1:{shared.drafts[4].port}", "--cluster", shared.cluster]
    assert cli.main(["plan", "dipsd", *where]) == 1
    assert "no request uses the policy dip-sd there now" in capsys.readouterr().err
    saved = tmp_path / "measured.toml"

    async def main() -> int:
        begun = asyncio.Event()
        users = [
            asyncio.create_task(shared.ask(n, PROMPTS[n], 1500, begun, "dip-sd")) for n in range(4)
        ]
        await begun.wait()
        client = await Client.connect("127.0.0.1", shared.drafts[4].port, shared.cluster)
        try:
            while sum(map(bool, (await client.plan_status()).lengths)) < 4:
                assert not any(user.done() for user in users)
            argv = ["plan", "dipsd", *where, "--json", "--save", str(saved)]
            return await asyncio.to_thread(cli.main, argv)
        finally:
            await client.close()
            for user in users:
                user.cancel()
            await asyncio.gather(*users, return_exceptions=True)

    assert asyncio.run(main()) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["users"], found["stages"]) == (4, 2)
    assert sorted(found["throughput_by_user"]) == [f"draft-{n}" for n in range(4)]
    running = found["running"]
    assert running["used"] in ("plan", "greedy", "greedy_probe", "plan_paused")
    assert running["forecast"]["greedy"] > 0
    assert all(length > 0 for length in running["lengths"].values())
    assert cli.main(["plan", "dipsd", str(saved), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["throughput"] == pytest.approx(found["throughput"])
    assert again["running"] is None


def test_each_says_how_the_stages_are(shared: Shared) -> None:
    everybody = {draft_rank(number) for number in range(6)}

    async def linked() -> Status:
        """That draft node, once all are linked: one that was late may just be linked anew."""
        async with asyncio.timeout(START):
            while True:
                found = await shared.nodes(3)
                draft, first, second = sorted(found, key=lambda status: status.role)
                if {*first.peers, *second.peers} == everybody | {1, 2} and not draft.missing:
                    return draft

    draft = asyncio.run(linked())
    assert (draft.rank, draft.role) == (draft_rank(3), "draft")


def test_a_killed_draft_node_ends_no_other(shared: Shared) -> None:
    async def main() -> None:
        begun, seen = asyncio.Event(), asyncio.Event()
        doomed = asyncio.create_task(shared.ask(5, PROMPTS[5], 1500, begun, doomed=True))
        others = [
            asyncio.create_task(shared.ask(n, PROMPTS[n], 2 * TOKENS, seen)) for n in range(5)
        ]
        await asyncio.gather(begun.wait(), seen.wait())
        shared.drafts[5].process.kill()
        with pytest.raises(ClusterError, match="is gone"):
            await doomed
        ends = await asyncio.gather(*others)
        assert shared.undisturbed(ends)
        assert [end.reason for end in ends] == ["length"] * 5

    asyncio.run(main())
    for number in range(5):
        expected = generate(BUNDLED_TARGET, PROMPTS[number], 2 * TOKENS)[0]
        assert shared.tokens[number] == expected
