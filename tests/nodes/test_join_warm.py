"""Spares that prepare for the loss of another machine: which stage they load, and what they keep in
the page cache."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.backend.base import FilePart
from asyncspec.placement.model import LayerCost, Span, TargetCost
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.plugins.join import page_cache
from asyncspec_nodes.plugins.join.assignment import Assigned
from asyncspec_nodes.plugins.join.members import Members
from asyncspec_nodes.plugins.join.messages import Orders, ToMember
from asyncspec_nodes.plugins.join.page_cache import PIECE, PageCache, read_through
from nodes.test_join_coordinator import CONFIG, offer

TARGET = TargetCost((LayerCost(1, 1),) * 6)
STAGES = (Assigned("c", 0, (0, 3)), Assigned("a", 0, (3, 4)), Assigned("b", 0, (4, 6)))


class Cluster:
    """Members a and b, c on the first machine, and spares."""

    def __init__(self, *spares: str, warm: bool = True) -> None:
        self.members = Members(CONFIG, TARGET, 4, warm=warm)
        self.sent: dict[str, list[ToMember]] = {}
        addresses = {"c": "127.0.0.1"}
        for number, name in enumerate(("c", "a", "b", *spares)):
            sent = self.sent[name] = []
            seen = addresses.get(name, f"10.0.0.{number}")
            self.members.admit(
                offer(name, reached=addresses.get(name, "192.0.2.1")), seen, sent.append
            )
        self.members.assign(STAGES)
        self.members.serving = {1, 2, 3}
        self.members.stand_by(self.members.standby()())

    def orders(self, name: str) -> Orders:
        return [one for one in self.sent[name] if isinstance(one, Orders)][-1]


def test_a_warm_spare_loads_the_largest_stage_that_may_be_lost() -> None:
    """Not the first machine's: without it there is no cluster."""
    cluster = Cluster("d")
    assert (cluster.orders("d").ranks, cluster.orders("d").standby) == ((), (3,))
    assert cluster.orders("d").cached == ((4, 6), (3, 4))
    for name in "abc":
        assert not cluster.orders(name).standby
        assert not cluster.orders(name).cached


def test_it_is_dropped_for_a_machine_that_is_suspected() -> None:
    cluster = Cluster("d")
    members = cluster.members
    while members.by_id["a"].presence.state == "here":
        for name in "bcd":
            members.by_id[name].presence.received()
        members.tick()
    members.stand_by(members.standby()())
    assert cluster.orders("d").standby == (2,)


@pytest.mark.parametrize("spares", ["", "d"])
def test_others_are_left_alone(spares: str) -> None:
    cluster = Cluster(*spares, warm=not spares)
    assert not any(cluster.orders(name).standby for name in cluster.sent)
    assert not any(cluster.orders(name).cached for name in cluster.sent)


@given(
    sizes=st.lists(st.integers(0, 3 * PIECE), max_size=4),
    most=st.integers(0, 8 * PIECE),
)
def test_so_many_bytes_are_read_and_no_more(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], most: int
) -> None:
    file = tmp_path_factory.getbasetemp() / "weights"
    with file.open("wb") as stream:
        stream.truncate(16 * PIECE)
    parts = [FilePart(file, sum(sizes[:n]), size) for n, size in enumerate(sizes)]
    assert read_through(parts, most, threading.Event()) == min(most, sum(sizes))
    stopped = threading.Event()
    stopped.set()
    assert read_through(parts, most, stopped) == 0


@pytest.mark.asyncio
async def test_layers_are_read_in_order_as_far_as_memory_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Span] = []
    reads: list[tuple[int, int]] = []

    async def find(span: Span) -> str:
        asked.append(span)
        return str(BUNDLED_TARGET)

    def read(parts: list[FilePart], most: int, stop: threading.Event) -> int:
        count = min(most, sum(part.length for part in parts))
        reads.append((most, count))
        return count

    monkeypatch.setattr(page_cache, "free_memory", lambda: 1 << 40)
    monkeypatch.setattr(page_cache, "read_through", read)
    cache = PageCache(find)
    cache.follow(((1, 2), (0, 1)))
    assert cache._reading is not None
    await cache._reading
    assert asked == [(1, 2), (0, 1)]
    assert reads[1][0] == (1 << 40) - reads[0][1] < 1 << 40
    cache.follow(())
    assert cache._reading is None
