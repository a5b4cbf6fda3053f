"""The machine that keeps a cluster together: addresses that change, stages that fail, and its own
mistakes. Members are here, without connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from asyncspec.core.errors import ClusterError, UserError
from asyncspec.placement.model import LayerCost, TargetCost
from asyncspec_nodes.cluster.config import Config, DraftTable, NodeTable, TargetTable
from asyncspec_nodes.plugins.join.assignment import Assigned
from asyncspec_nodes.plugins.join.coordinator import Coordinator, CoordinatorOptions
from asyncspec_nodes.plugins.join.formation import Formation, FormationOptions
from asyncspec_nodes.plugins.join.members import Members
from asyncspec_nodes.plugins.join.messages import (
    PORTS,
    Alive,
    Dropped,
    Failed,
    Leaving,
    Measured,
    Offer,
    Orders,
    Refused,
    ToMember,
)
from asyncspec_nodes.plugins.join.server import check_offer
from asyncspec_protocol.messages import PROTOCOL_VERSION

CONFIG = Config(
    TargetTable("toy:layers=6"), (NodeTable(0, "127.0.0.1", 1),), draft=DraftTable("ngram")
)
TARGET = TargetCost((LayerCost(1, 1),) * 3)
SLOW = TargetCost((LayerCost(10**8, 10**8),) * 3)
"""Passes of .3 s on one machine, beside which links take nothing."""

FIRST = "192.0.2.1"


def offer(name: str, first: int = 7700, reached: str = FIRST) -> Offer:
    """Of a machine whose ports begin with ``first``."""
    ports = tuple(range(first, first + PORTS))
    return Offer(name, name, "1", PROTOCOL_VERSION, 1 << 30, 1e9, "", ports, reached, "")


class Started:
    """A coordinator after its start, with members a, b and c, each with a stage; c is on the
    first machine."""

    def __init__(self, folder: Path, target: TargetCost = TARGET) -> None:
        self.said: list[str] = []
        self.sent: dict[str, list[ToMember]] = {}
        options = CoordinatorOptions("up", holds=False)
        self.coordinator = Coordinator(
            CONFIG, target, options, lambda token: None, self.said.append
        )
        self.coordinator._folder = folder
        self.admit(offer("c", reached="127.0.0.1"), "127.0.0.1")
        self.admit(offer("a"), "10.0.0.1")
        self.admit(offer("b"), "10.0.0.2")
        stages = [Assigned(name, 0, (n, n + 1)) for n, name in enumerate("abc")]
        self.coordinator.members.assign(tuple(stages))

    def admit(self, one: Offer, seen: str) -> None:
        self.sent[one.member] = []
        self.coordinator.admit(one, seen, self.sent[one.member].append)

    def lose(self, name: str) -> None:
        self.coordinator.lost(self.coordinator.members.by_id[name])

    def orders(self, name: str) -> Orders:
        """The last ones."""
        return [one for one in self.sent[name] if isinstance(one, Orders)][-1]


@pytest.mark.asyncio
async def test_all_learn_the_address_of_a_member_that_returns_with_another(tmp_path: Path) -> None:
    started = Started(tmp_path)
    version = started.orders("a").version
    assert 'host = "10.0.0.2"' in started.orders("a").config
    started.lose("b")
    started.admit(offer("b"), "10.0.0.99")
    for text in (started.orders("a").config, started.coordinator.file.read_text()):
        assert 'host = "10.0.0.99"' in text
        assert "10.0.0.2" not in text
    # The orders are the same ones: nothing is started again.
    assert started.orders("a").version == version
    started.lose("b")
    started.admit(offer("b", first=8800), "10.0.0.99")
    assert "port = 8800" in started.orders("a").config
    count = len(started.sent["a"])
    started.lose("b")
    started.admit(offer("b", first=8800), "10.0.0.99")
    assert len(started.sent["a"]) == count


@pytest.mark.asyncio
async def test_all_learn_another_address_of_the_first_machine(tmp_path: Path) -> None:
    started = Started(tmp_path)
    assert f'host = "{FIRST}"' in started.orders("a").config
    moved = "192.0.2.77"
    for name, seen in (("a", "10.0.0.1"), ("b", "10.0.0.2")):
        started.lose(name)
        started.admit(offer(name, reached=moved), seen)
    for name in "ab":
        assert f'host = "{moved}"' in started.orders(name).config
    assert FIRST not in started.coordinator.file.read_text()


def test_the_first_machine_has_one_address_where_members_reach_it_under_two() -> None:
    members = Members(CONFIG, TARGET, 4)
    members.admit(offer("c", reached="127.0.0.1"), "127.0.0.1", lambda message: None)
    members.admit(offer("a"), "10.0.0.1", lambda message: None)
    for _ in range(2):
        members.admit(offer("b", reached="198.51.100.1"), "198.51.100.2", lambda message: None)
        assert members.by_id["c"].host == FIRST


@pytest.mark.asyncio
async def test_several_stages_of_a_member_fail(tmp_path: Path) -> None:
    started = Started(tmp_path)
    coordinator = started.coordinator
    stages = (("a", 0), ("b", 0), ("b", 1))
    coordinator.members.assign(
        tuple(Assigned(name, port, (n, n + 1)) for n, (name, port) in enumerate(stages))
    )
    version = started.orders("b").version
    for rank in (2, 3):
        assert coordinator.received("b", Failed(version, rank, "no memory"))
    assert "b" not in coordinator.members.by_id
    assert [one for one in started.sent["b"] if isinstance(one, Refused)] == [
        Refused("its stage has failed: no memory", user=False)
    ]


@pytest.mark.asyncio
async def test_others_get_the_layers_of_a_machine_that_falls_silent(tmp_path: Path) -> None:
    """It is told, for when it goes on, and may join anew."""
    started = Started(tmp_path)
    coordinator, members = started.coordinator, started.coordinator.members
    changes = 0
    while "b" in members.by_id:
        for name in "ac":
            coordinator.received(name, Alive())
        changes += members.tick()
        await coordinator._repair()
        assert members.by_id["a"].presence.silent_seconds == 0
    assert changes == 2  # suspected, then gone
    assert "b is gone: silent for 6 s" in started.said
    assert started.sent["b"][-1] == Dropped()
    assert {one.member for one in members.assignment} == {"a", "c"}
    assert coordinator.received("b", Leaving())  # its connection is its to end
    started.admit(offer("b"), "10.0.0.2")
    assert members.spares == [members.by_id["b"]]


@pytest.mark.asyncio
@pytest.mark.parametrize("user", [True, False])
async def test_a_member_learns_whether_a_user_can_change_its_failure(
    tmp_path: Path, user: bool
) -> None:
    started = Started(tmp_path)
    started.coordinator.received("b", Failed(started.orders("b").version, 2, "why", user))
    assert started.sent["b"][-1] == Refused("its stage has failed: why", user)


@pytest.mark.asyncio
async def test_a_cluster_file_that_cannot_be_written_is_written_later(tmp_path: Path) -> None:
    """Repairs go on meanwhile."""
    folder = tmp_path / "full"
    started = Started(folder)
    coordinator = started.coordinator
    started.lose("b")
    started.admit(offer("b"), "10.0.0.99")
    for _ in range(3):
        await coordinator._repair()
    said = [line for line in started.said if "cannot be written" in line]
    assert len(said) == 1
    assert str(coordinator.file) in said[0]
    folder.mkdir()
    await coordinator._repair()
    assert 'host = "10.0.0.99"' in coordinator.file.read_text()


@pytest.mark.asyncio
async def test_a_mistake_of_ours_ends_the_cluster(tmp_path: Path) -> None:
    class Mistaken(Coordinator):
        async def _repair(self) -> None:
            raise IndexError("list index out of range")

    options = CoordinatorOptions("up", holds=False)
    made = Mistaken(CONFIG, TARGET, options, lambda token: None, lambda line: None)
    made._folder = tmp_path
    made._start(made._guard())
    made._changed.set()
    async with asyncio.timeout(240):
        with pytest.raises(IndexError):
            await made.watch()


@pytest.mark.parametrize("count", [0, 1, PORTS - 1])
def test_a_machine_with_fewer_ports_than_stages_it_may_get_is_refused(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncspec_nodes.plugins.join.server.version", lambda name: "1")
    check_offer(offer("b"))
    with pytest.raises(UserError, match=f"b has {count} ports"):
        check_offer(replace(offer("b"), ports=offer("b").ports[:count]))


def named(member: str, name: str, first: int = 7700) -> Offer:
    return replace(offer(member, first), name=name)


def test_machines_of_one_name_are_told_apart() -> None:
    members = Members(CONFIG, TARGET, 4)
    for one, seen in ((named("a", "vm"), "10.0.0.1"), (named("b", "box"), "10.0.0.2")):
        members.admit(one, seen, lambda message: None)
    assert [members.name(name) for name in "ab"] == ["vm", "box"]
    members.admit(named("c", "vm"), "10.0.0.3", lambda message: None)
    assert [members.name(name) for name in "abc"] == ["vm (10.0.0.1)", "box", "vm (10.0.0.3)"]
    members.admit(named("d", "vm", 8800), "10.0.0.3", lambda message: None)
    assert [members.name(name) for name in "cd"] == [
        "vm (10.0.0.3, port 7700)",
        "vm (10.0.0.3, port 8800)",
    ]
    members.assign((Assigned("a", 0, (0, 1)), Assigned("b", 0, (1, 3))))
    assert [node.name for node in members.config().node] == ["", "vm (10.0.0.1)", "box"]


class Forming:
    """A formation whose clock is its own, with members that come."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.said: list[str] = []
        self.now = 0.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        self.members = Members(CONFIG, SLOW, 4)
        how = FormationOptions(**options)
        self.formation = Formation(self.members, SLOW, how, 120.0, self.said.append)

    def join(self, name: str) -> None:
        self.members.admit(offer(name), "10.0.0.1", lambda message: None)
        self.formation.joined_at = self.now

    async def run(self, *script: Callable[[], None] | float) -> None:
        """Place the layers, while each second one more thing happens: a call, or so many seconds
        pass."""
        steps = iter(script)

        async def change(seconds: float) -> None:
            step = next(steps, 1.0)
            if isinstance(step, float):
                self.now += step
            else:
                step()

        await self.formation.place(change)


@pytest.mark.asyncio
async def test_the_wait_is_shown_and_enter_prolongs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Forming(monkeypatch, asks=True)
    shown: list[str] = []
    await one.run(
        lambda: shown.append(one.formation.pending()),
        lambda: one.join("a"),
        5.0,
        lambda: shown.append(one.formation.pending()),
        one.formation.pressed,
        30.0,
        lambda: one.join("b"),
        30.0,
        one.formation.pressed,
    )
    assert one.said[0] == "starts alone in 10 s; --machines 3, or Enter to wait"
    assert shown == ["machines to join (0 here)", "machines to join (1 here, 5 s more)"]
    assert "waits for further machines" in one.said[1]
    assert {stage.member for stage in one.members.assignment} == {"a", "b"}
    assert one.now < 70.0


@pytest.mark.asyncio
async def test_a_short_wait_ends_with_those_who_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Forming(monkeypatch, wait_seconds=6.0)
    await one.run(lambda: one.join("a"))
    assert one.said[0].startswith("starts alone in 3 s")
    assert len(one.members.assignment) == 1


@pytest.mark.asyncio
async def test_machines_of_the_last_run_are_waited_for_and_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = Forming(monkeypatch)
    one.formation.expected = 3
    await one.run(*(partial(one.join, name) for name in "abc"))
    assert one.now == 0.0
    assert {stage.member for stage in one.members.assignment} == set("abc")
    # One of them is gone for good.
    two = Forming(monkeypatch)
    two.formation.expected = 3
    await two.run(*(partial(two.join, name) for name in "ab"))
    assert 10.0 < two.now < 13.0
    assert "or once the 3 of its last run are here" in two.said[0]


@pytest.mark.asyncio
async def test_machines_that_do_not_come_are_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Forming(monkeypatch, machines=3, wait_seconds=20.0)
    with pytest.raises(ClusterError, match="1 of 3 machines"):
        await one.run(lambda: one.join("a"))


@pytest.mark.asyncio
async def test_an_idle_cluster_is_planned_anew_for_machines_that_promise_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Started(tmp_path, SLOW)
    cluster = started.coordinator
    cluster.members.assign((Assigned("a", 0, (0, 3)),))
    cluster.members.serving = {1}
    idle = False

    async def is_idle() -> bool:
        return idle

    cluster.is_idle = is_idle
    monkeypatch.setattr("asyncspec_nodes.plugins.join.coordinator.IDLE_SECONDS", 0.0)
    await cluster._improve()
    assert len(cluster.members.assignment) == 1
    idle = True
    await cluster._improve()
    assert len(cluster.members.assignment) == 3
    assert not cluster.members.serving
    (line,) = [line for line in started.said if "plans anew" in line]
    assert "3 machines about" in line
    assert "as planned now 1 machine about" in line
    assert line.count("tokens/s") == 2
    # Nothing better is to be had now.
    cluster.members.serving = {1, 2, 3}
    await cluster._improve()
    # Nor with a fourth machine, as there are three layers, which that one is told.
    started.admit(offer("d"), "10.0.0.4")
    assert not started.orders("d").spare  # it is not known yet
    await cluster._improve()
    assert len([line for line in started.said if "plans anew" in line]) == 1
    why = "no plan with it promises more than now: 3 machines about"
    assert [line for line in started.said if line.startswith(f"spare: d: {why}")]
    assert why in started.orders("d").spare
    assert started.orders("a").spare == ""


@pytest.mark.asyncio
async def test_a_machine_that_was_busy_when_it_joined_gets_more_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It measures itself again."""
    started = Started(tmp_path, SLOW)
    cluster = started.coordinator
    members = cluster.members
    monkeypatch.setattr("asyncspec_nodes.plugins.join.coordinator.IDLE_SECONDS", 0.0)

    async def is_idle() -> bool:
        return True

    cluster.is_idle = is_idle
    for name in "bc":
        cluster.received(name, Leaving())
    slow = offer("b")
    started.admit(replace(slow, speed=0.36e9), "10.0.0.2")
    members.assign((Assigned("a", 0, (0, 3)),))
    members.serving = {1}
    await cluster._improve()
    assert {stage.member for stage in members.assignment} == {"a"}
    assert "layers move for" in started.orders("b").spare
    cluster.received("b", Measured(slow.speed))
    await cluster._improve()
    assert {stage.member for stage in members.assignment} == {"a", "b"}
    assert not started.orders("b").spare


@pytest.mark.asyncio
async def test_a_cluster_that_ends_says_nothing_of_its_machines(tmp_path: Path) -> None:
    started = Started(tmp_path)
    await started.coordinator.__aexit__()
    said = len(started.said)
    for name in "ab":
        started.lose(name)
    assert len(started.said) == said


@pytest.mark.asyncio
async def test_a_spare_loads_what_a_suspected_machine_holds(tmp_path: Path) -> None:
    """When that one is gone the spare is told to run it, and when it is heard again to drop it."""
    started = Started(tmp_path)
    coordinator, members = started.coordinator, started.coordinator.members
    started.admit(offer("d"), "10.0.0.4")
    members.serving = {1, 2, 3}

    async def tick(*alive: str) -> None:
        for name in alive:
            coordinator.received(name, Alive())
        members.tick()
        await coordinator._repair()

    async def silent_b(state: str) -> None:
        while members.by_id["b"].presence.state != state:
            await tick("a", "c", "d")

    await silent_b("suspected")
    orders = started.orders("d")
    assert (orders.ranks, orders.standby, orders.standby_ports) == ((), (2,), (0,))
    assert members.assignment[1].member == "b"
    count = len(started.sent["a"])
    await tick("a", "b", "c", "d")
    assert started.orders("d").standby == ()
    await silent_b("suspected")
    assert started.orders("d").standby == (2,)
    while "b" in members.by_id:
        await tick("a", "c", "d")
    orders = started.orders("d")
    assert (orders.ranks, orders.ports, orders.standby) == ((2,), (0,), ())
    # Others learn of it only then.
    later = [one for one in started.sent["a"][count:] if isinstance(one, Orders)]
    assert len(later) == 1


@pytest.mark.asyncio
async def test_a_node_that_does_not_say_whether_anybody_asks_delays_nothing(tmp_path: Path) -> None:
    started = Started(tmp_path)
    cluster = started.coordinator
    started.admit(offer("d"), "10.0.0.4")
    cluster.members.serving = {1, 2, 3}
    cluster._changed.clear()

    async def is_idle() -> bool:
        cluster._changed.set()
        await asyncio.Event().wait()
        return True

    cluster.is_idle = is_idle
    await cluster._improve()
    assert cluster._changed.is_set()


@pytest.mark.asyncio
async def test_nobody_gives_layers_up_for_a_suspicion(tmp_path: Path) -> None:
    """Where all layers would be split anew nothing is loaded before the machine is gone."""
    started = Started(tmp_path)
    members = started.coordinator.members
    for name in "ac":
        member = members.by_id[name]
        member.offer = replace(member.offer, memory=1)
    while members.by_id["b"].presence.state == "here":
        for name in "ac":
            started.coordinator.received(name, Alive())
        members.tick()
    await started.coordinator._repair()
    assert not any(started.orders(name).standby for name in "ac")
