"""A request for which the kernel ends a stage is refused the next time, and so are longer ones."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.core.jobs import Batch, Forward
from asyncspec.core.machine import Compute, Effect, Input, Request
from asyncspec.core.stats import MAX_BREAKS
from asyncspec_nodes.client.client import ClusterAddress
from asyncspec_nodes.client.engine import ReconnectingEngine
from asyncspec_nodes.cluster.control_groups import MemoryKills
from asyncspec_nodes.local.children import Again, ChildNode
from asyncspec_nodes.local.cluster import LocalCluster, LocalLauncher
from asyncspec_nodes.node.supervisor import RESTARTS
from asyncspec_nodes.roles.draft import memory_bound
from asyncspec_nodes.roles.draft.memory_bound import LEAST_TOKENS, MAX_SUSPECTS, MemoryBound
from asyncspec_nodes.roles.verify.machine import VerifyMachine
from asyncspec_protocol.clients import BREAKS, TOO_LARGE
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.links import role_of
from asyncspec_protocol.messages import Finished, Submit
from cluster import Cluster, ask
from costs import UnitCosts
from effort import examples
from laws import check_answer, check_empty, watch_invariants
from nodes import hungry_node
from nodes.background import no_process_left
from nodes.test_restarts import TOY, config
from tools.testbed import cgroups

LIMIT = 48
"""Tokens that a stage of the simulation has no memory for, and ``LEAST_TOKENS`` there."""


class Starving:
    """A cluster whose last stage the kernel ends where it is to compute a row at ``LIMIT`` or
    behind; its next process says so."""

    # What its next process says: a field of ``Ready``.
    field = "memory_kill"

    def __init__(self, limit: int = LIMIT) -> None:
        self.kills = 0
        self._limit = limit
        self._dying = False
        self.cluster = Cluster(UnitCosts(), stages=2, max_breaks=MAX_BREAKS, prefill_rows=16)
        watch_invariants(self.cluster)
        self._invariants = self.cluster.world.watch
        self.cluster.world.watch = self._watch

    def run(self, *asked: Request) -> None:
        with mock.patch.object(memory_bound, "LEAST_TOKENS", LIMIT):
            for request in asked:
                self.cluster.submit(request)
            self.cluster.world.run(until=100_000.0)

    def _watch(self, rank: Rank, event: Input, effects: tuple[Effect, ...]) -> None:
        assert self._invariants is not None
        self._invariants(rank, event, effects)
        if rank == 2 and not self._dying and any(map(self._starves, effects)):
            self._dying = True
            self.cluster.world.at(self.cluster.world.now, self._kill)

    def _starves(self, effect: Effect) -> bool:
        job = effect.job if isinstance(effect, Compute) else None
        passes = job.passes if isinstance(job, Batch) else (job,)
        rows = [row for one in passes if isinstance(one, Forward) for row in one.rows]
        return any(row.position >= self._limit for row in rows)

    def _kill(self) -> None:
        self._dying = False
        self.kills += 1
        world, actor = self.cluster.world, self.cluster.stage(Rank(2))
        assert isinstance(actor.machine, VerifyMachine)
        actor.machine = VerifyMachine(replace(actor.machine.config, **{self.field: self.kills}))
        actor.state = actor.machine.initial()
        world.restart(Rank(2), actor)
        world.at(world.now + 3, self.cluster.connect_all)


def long(number: int, tokens: int, first: int = 1) -> Request:
    return ask(number, prompt=(first, *(i % 16 for i in range(tokens - 1))))


def test_the_longest_is_refused_with_its_size_and_others_go_on() -> None:
    starving, bad = Starving(), long(1, 70)
    starving.run(ask(0), bad, ask(2, max_new_tokens=16))
    finish = starving.cluster.world.finished[1]
    assert (finish.reason, finish.code, starving.kills) == ("error", TOO_LARGE, 1)
    assert finish.detail.startswith(
        "70 tokens are too many: 70 have ended stage 2 for want of memory"
    )
    for request in (ask(0), ask(2, max_new_tokens=16)):
        check_answer(starving.cluster, request)
    # Nobody is ended by it again, nor by a longer one.
    starving.run(long(3, 70), long(4, 90, first=2), ask(5))
    assert starving.kills == 1
    assert starving.cluster.world.finished[4].detail.startswith("90 tokens are too many: 70 ")
    assert {starving.cluster.world.finished[n].code for n in (3, 4)} == {TOO_LARGE}
    check_answer(starving.cluster, ask(5))
    check_empty(starving.cluster)


def test_an_answer_stays_below_what_has_ended_a_stage() -> None:
    starving, short = Starving(70), long(1, 50)
    starving.run(long(0, 80))
    starving.run(replace(short, max_new_tokens=40, policy="autoregressive"))
    assert starving.kills == 2  # the bound was ten tokens too high
    answer = starving.cluster.world.tokens[1]
    assert 19 <= len(answer) <= 21
    starving.run(replace(short, request=2, max_new_tokens=40, policy="autoregressive"))
    assert starving.kills == 2
    finish = starving.cluster.world.finished[2]
    assert (finish.reason, starving.cluster.world.tokens[2]) == ("length", answer[:-1])


def test_of_a_short_one_only_its_like_is_refused() -> None:
    """There was no memory for any then: a bound so low would refuse everybody."""
    starving, bad = Starving(30), long(1, 31)
    starving.run(ask(0, max_new_tokens=2), bad)
    assert (starving.cluster.world.finished[1].code, starving.kills) == (TOO_LARGE, 1)
    assert "31 tokens like this one has ended stage 2" in starving.cluster.world.finished[1].detail
    starving.run(replace(bad, request=2), ask(3, max_new_tokens=2))
    assert (starving.cluster.world.finished[2].code, starving.kills) == (TOO_LARGE, 1)
    check_answer(starving.cluster, ask(3, max_new_tokens=2))


@settings(max_examples=examples(100, quick=30))
@given(st.lists(st.integers(6, 2 * LIMIT), min_size=1, max_size=4), st.data())
def test_each_request_ends_a_stage_once_at_most(sizes: list[int], data: st.DataObject) -> None:
    """Whatever shares passes with it, and whoever is read first."""
    starving = Starving()
    asked = [
        replace(long(number, size, first=number), max_new_tokens=8)
        for number, size in enumerate(sizes)
    ]
    starving.run(*data.draw(st.permutations(asked)))
    world, kills = starving.cluster.world, starving.kills
    tree = 24  # which reaches ahead of the answer
    for request in asked:
        size = len(request.prompt)
        if size > LIMIT:
            # With the second kill it may be alone and silent twice, which is enough as well.
            assert world.finished[request.request].code in (TOO_LARGE, BREAKS)
        elif size + request.max_new_tokens + tree < LIMIT:
            check_answer(starving.cluster, request)
    assert kills <= sum(size + 8 + tree >= LIMIT for size in sizes)
    check_empty(starving.cluster)


lengths = st.integers(1, 4 * LEAST_TOKENS)


@given(lengths, lengths, lengths, st.integers(0, 9))
def test_what_is_learnt(served: int, tokens: int, later: int, answered: int) -> None:
    answered = min(answered, tokens - 1)
    prompt, answer = (1,) * (tokens - answered), (2,) * answered
    bound = MemoryBound().ended(served).broken([((), ()), (prompt, answer)]).reported(Rank(2), 5)
    refused = bool(bound.refusal((3,) * later, ()))
    assert refused == (served < tokens <= later and tokens >= LEAST_TOKENS)
    assert bool(bound.refusal(prompt, answer)) == (served < tokens)
    assert len(bound.suspects) == (served < tokens < LEAST_TOKENS)
    # Its later reports are of the same end; and a break that is over explains none.
    more = bound.broken([((7,), ())])
    assert more.reported(Rank(2), 5) == more
    assert not more.opened().reported(Rank(2), 6).refusal((7,), ())


def test_suspects_are_few() -> None:
    bound = MemoryBound()
    for number in range(MAX_SUSPECTS + 1):
        bound = bound.broken([((number,), ())]).reported(Rank(1), number + 1)
    assert not bound.refusal((0,), ())
    assert all(bound.refusal((number,), ()) for number in range(1, MAX_SUSPECTS + 1))


@pytest.mark.parametrize(
    ("own", "file"),
    [
        ("0::/a", "a/memory.events"),
        ("4:memory:/a\n0::/", "memory/a/memory.oom_control"),
        ("4:memory:/docker/1", "memory/memory.oom_control"),
        ("0::/", "vmstat"),
    ],
)
def test_the_kernels_count(tmp_path: Path, own: str, file: str) -> None:
    counter = tmp_path / file
    counter.parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "own").write_text(own + "\n")
    kills = MemoryKills(tmp_path, tmp_path / "vmstat")
    kills.look(tmp_path / "own", 0.0)
    assert not kills.risen
    counter.write_text("oom 3\noom_kill 1\n")
    kills.look(tmp_path / "own", 5.0)
    assert not kills.risen
    counter.write_text("oom 9\noom_kill 2\n")
    # What the process had written is read when it has ended.
    kills.look(tmp_path / "own", 5.1)
    assert kills.risen
    kills.look(tmp_path / "own", 7.0)
    # The process is gone, and its files with it.
    (tmp_path / "own").unlink()
    assert kills.risen


def test_a_process_that_joins_its_group_after_its_start(tmp_path: Path) -> None:
    """It may have been ended within a second."""
    (tmp_path / "vmstat").write_text("oom_kill 7\n")
    group = tmp_path / "a"
    group.mkdir()
    (group / "memory.events").write_text("oom_kill 1\n")
    kills = MemoryKills(tmp_path, tmp_path / "vmstat")
    (tmp_path / "own").write_text("0::/\n")
    kills.look(tmp_path / "own", 0.0)
    (tmp_path / "own").write_text("0::/a\n")
    kills.look(tmp_path / "own", 0.3)
    assert not kills.risen
    (group / "memory.events").write_text("oom_kill 2\n")
    # Once it has ended it is in no group of its own.
    (tmp_path / "own").write_text("0::/\n")
    kills.look(tmp_path / "own", 9.0)
    assert kills.risen


class LimitedLauncher(LocalLauncher):
    """Stage 2 is in a control group with little memory, and takes much."""

    def __init__(self, entrance: Path) -> None:
        super().__init__()
        self._entrance = entrance

    async def start(self, rank: int, log: Path, *, again: Again) -> ChildNode:
        """See ``LocalLauncher``."""
        if rank != 2:
            return await super().start(rank, log, again=again)
        words = [str(Path(hungry_node.__file__)), str(self._entrance), str(1 << 18)]
        role, sock = role_of(rank, self._config.stages), self._sockets[rank]
        return await ChildNode.start(
            rank, role, self._file, sock, log, prefix=[sys.executable, *words], again=again
        )


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_in_a_control_group_with_a_limit(tmp_path: Path) -> None:
    """The kernel itself ends the stage."""
    found = cgroups.detect(Path("/proc/mounts").read_text())
    if os.geteuid() != 0 or found is None or found.memory is None:
        pytest.skip("needs root and cgroups of memory")
    group = cgroups.group(found, f"asyncspec-test-{os.getpid()}", None, 400)
    said: list[str] = []

    async def ask_for(client: ReconnectingEngine, prompt: str) -> Finished:
        submit = Submit(0, prompt, 4, 0, 0.0, 0, 1.0, ignore_eos=True)
        async for event in client.ask(submit):
            if isinstance(event, Finished):
                return event
        raise AssertionError("there was no end")

    async def main() -> list[Finished]:
        launch = LimitedLauncher(group.entrances[0])
        quiet = {"launch": launch, "restarts": RESTARTS, "notify": said.append}
        async with LocalCluster(config(TOY), lambda report: None, tmp_path, **quiet) as cluster:
            where = ClusterAddress(*cluster.address, cluster.config.cluster.name)
            async with ReconnectingEngine(where.connect, waits=True) as client:
                bad = "many words " * 400
                side_by_side = [ask_for(client, text) for text in ("a fox", bad, "a hen")]
                ends = await asyncio.gather(*side_by_side)
                return [*ends, await ask_for(client, bad), await ask_for(client, "a fox")]

    cgroups.create(found, group)
    try:
        with no_process_left():
            ends = asyncio.run(main())
    finally:
        cgroups.remove(group.folders)
    assert said == ["stage 2 was ended by the kernel for want of memory; it is started again"]
    assert [end.reason for end in ends] == ["length", "error", "length", "error", "length"]
    for end in (ends[1], ends[3]):
        assert end.code == TOO_LARGE
        assert "have ended stage 2 for want of memory" in end.detail
