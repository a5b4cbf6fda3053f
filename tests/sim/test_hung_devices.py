"""A device that hangs while its node lives: the node is given up, and the answers go on."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncspec.actor.watchdog import COLD_FACTOR, DeviceWatchdog
from asyncspec.core.jobs import Job, Release
from asyncspec.core.machine import Compute, Effect, Request
from asyncspec.sim.world import Actor, QueuedJob, World
from asyncspec_protocol.ids import Rank, SessionId
from cluster import Cluster, ask
from costs import UnitCosts
from effort import examples
from laws import Shaken, check_after, clusters, requests, watch_invariants

FLOOR = 100.0
"""Seconds; the jobs of these clusters take up to 9."""

FOREVER = math.inf
BOUND = 100_000.0


class Hanging(Shaken):
    """The ``number``-th job of one device never ends."""

    victim: Rank = Rank(1)
    number: int = 0

    def device(self, rank: Rank, job: Job) -> float:
        if rank == self.victim:
            self.number -= 1
            if self.number == -1:
                return FOREVER
        return super().device(rank, job)


class WatchedWorld(World):
    """Devices are watched as the runtime does, those of nodes that start later as well."""

    def watch_devices(self, floor_seconds: float, give_up: Callable[[Rank, str], None]) -> None:
        """``give_up``: called with the rank of a node whose device hangs, and the reason."""
        self.floor_seconds, self.give_up = floor_seconds, give_up
        # By the node's device queue.
        self.watchdogs: dict[int, DeviceWatchdog] = {}

    def _perform(self, rank: Rank, actor: Actor, effect: Effect) -> int:
        begins = isinstance(effect, Compute) and not actor.queue
        size = super()._perform(rank, actor, effect)
        if begins:
            watchdog = self.watchdogs.setdefault(
                id(actor.queue), DeviceWatchdog(self.floor_seconds)
            )
            self.at(self.now + watchdog.check_seconds, self._check, rank, actor, watchdog)
        return size

    def _ran(self, rank: Rank, actor: Actor, entry: QueuedJob, result: object | None) -> None:
        self.watchdogs[id(actor.queue)].observe(entry.job, entry.end - entry.start)
        super()._ran(rank, actor, entry, result)

    def _check(self, rank: Rank, actor: Actor, watchdog: DeviceWatchdog) -> None:
        """An idle device is not checked, so time may end."""
        if self.actors[rank] is not actor or not actor.queue:
            return
        entry = actor.queue[0]
        if reason := watchdog.check((entry.job, entry.start), self.now):
            self.give_up(rank, reason)
        else:
            self.at(self.now + watchdog.check_seconds, self._check, rank, actor, watchdog)


def start_again(cluster: Cluster, given_up: list[Rank], rank: Rank, why: str) -> None:
    """What a supervisor does."""
    assert "the device has been busy with one" in why
    given_up.append(rank)
    cluster.world.restart(rank, cluster.node(rank))
    cluster.world.at(cluster.world.now + 3, cluster.connect_all)


@settings(max_examples=examples(200, quick=60))
@given(
    clusters(costs=Hanging, world=WatchedWorld), requests(4), st.integers(0, 4), st.integers(0, 60)
)
def test_the_text_goes_on(cluster: Cluster, asked: list[Request], which: int, number: int) -> None:
    costs, world = cluster.costs, cluster.world
    assert isinstance(world, WatchedWorld)
    assert isinstance(costs, Hanging)
    costs.victim, costs.number = Rank(1 + which % (len(world.actors) - 1)), number
    watch_invariants(cluster)
    given_up: list[Rank] = []
    world.watch_devices(FLOOR, partial(start_again, cluster, given_up))
    for request in asked:
        cluster.submit(request)
    world.run(until=BOUND)
    check_after(cluster, asked)
    assert given_up in ([], [costs.victim])


@pytest.mark.parametrize("number", [0, 5, 40])
@pytest.mark.parametrize("victim", [1, 2, 3])
def test_any_hung_device_is_given_up(victim: int, number: int) -> None:
    """The first job, a prompt's chunk, a pass over a tree; of a stage or the token source."""
    costs = Hanging([1], victim=Rank(victim), number=number)
    cluster, given_up = Cluster(costs, stages=2, apart=True, world=WatchedWorld), list[Rank]()
    assert isinstance(cluster.world, WatchedWorld)
    cluster.world.watch_devices(FLOOR, partial(start_again, cluster, given_up))
    request = ask(prompt=tuple(range(8)) * 8, max_new_tokens=160)
    cluster.submit(request)
    cluster.world.run(until=BOUND)
    check_after(cluster, [request])
    assert given_up == [victim]


@settings(max_examples=examples(100, quick=50))
@given(clusters(world=WatchedWorld), requests(4))
def test_a_device_that_works_is_never_given_up(cluster: Cluster, asked: list[Request]) -> None:
    given_up: list[Rank] = []
    assert isinstance(cluster.world, WatchedWorld)
    cluster.world.watch_devices(10.0, partial(start_again, cluster, given_up))
    for request in asked:
        cluster.submit(request)
    cluster.world.run(until=BOUND)
    check_after(cluster, asked)
    assert not given_up


class OneHangs(UnitCosts, frozen=True):
    """Stage 1 hangs with everything it is to do."""

    def device(self, rank: Rank, job: Job) -> float:
        return FOREVER if rank == 1 else super().device(rank, job)


@pytest.mark.parametrize("floor", [10.0, 100.0])
def test_a_first_pass_has_time_to_warm_up(floor: float) -> None:
    cluster = Cluster(OneHangs(), stages=1, rejoin_seconds=30.0, world=WatchedWorld)
    world, ends = cluster.world, list[float]()
    assert isinstance(world, WatchedWorld)

    def give_up(rank: Rank, why: str) -> None:
        ends.append(world.now)
        world.restart(rank, cluster.node(rank))

    world.watch_devices(floor, give_up)
    cluster.submit(ask())
    world.run(until=BOUND)
    assert len(ends) == 1
    assert COLD_FACTOR * floor <= ends[0] <= COLD_FACTOR * floor + 10
    assert cluster.world.finished[0].reason == "error"


def test_the_watch_counts_only_time_in_which_its_node_has_run() -> None:
    """A process that was stopped, or a machine that slept, has not seen a device hang."""
    watchdog = DeviceWatchdog(FLOOR)
    service = (Release(SessionId(0)), 0.0)
    assert not watchdog.check(service, 1.0)
    assert not watchdog.check(service, 50 * COLD_FACTOR * FLOOR)
