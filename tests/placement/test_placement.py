"""Placement of layers: laws against all there is on small cases."""

from __future__ import annotations

from itertools import combinations, pairwise, permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.placement.model import (
    Connection,
    Constraints,
    Device,
    LayerCost,
    Network,
    Placement,
    TargetCost,
    evaluate,
)
from asyncspec.placement.rate import plain_rate, throughput_rate
from asyncspec.placement.search import MAX_WORK, _span_seconds, keeps_order, order_work, place


def mixed_rate(slowest: float, whole: float) -> float:
    """Between the two: neither the shortest way nor the fastest slowest stage."""
    return 1.0 / (slowest + 0.3 * whole)


BALANCED = throughput_rate(16)
RATES = (plain_rate, BALANCED, throughput_rate(2), mixed_rate)
"""Not ``speculative_rate``: it may rise, and a search by bounds then only comes near the best."""

few = st.integers(1, 4)
seconds = st.sampled_from([0.0, 0.1, 0.5, 3.0])
layer_costs = st.builds(
    LayerCost, weights=few, work=few, slot=st.integers(0, 1), results=few, session=st.integers(0, 1)
)


def within(target: TargetCost) -> TargetCost:
    """Without refused layers that the target does not have."""
    layers = len(target.layers)
    return replace(target, refused={s: why for s, why in target.refused.items() if s[1] <= layers})


some_spans = st.lists(st.integers(0, 5), min_size=2, max_size=2, unique=True).map(sorted).map(tuple)
targets = st.builds(
    TargetCost,
    layers=st.lists(layer_costs, min_size=1, max_size=5).map(tuple),
    refused=st.dictionaries(some_spans, st.just("it cannot"), max_size=6),
    whole=st.integers(0, 6),
    runtime=st.integers(0, 2),
    scores=st.integers(0, 1),
    row_bytes=few,
    slots=st.integers(0, 2),
    sessions=st.integers(1, 3),
    # Sums of these are rounded.
    layer_seconds=st.sampled_from([0.0, 0.0003, 0.5]),
    pass_seconds=st.sampled_from([0.0, 0.0002, 3.0]),
).map(within)


@st.composite
def networks(draw: Any) -> tuple[tuple[Device, ...], Network]:
    count = draw(st.integers(1, 3))
    devices = tuple(
        Device(
            f"d{number}",
            memory=draw(st.integers(1, 30)),
            speed=draw(st.sampled_from([1.0, 2.0, 5.0])),
            latency=draw(seconds),
            bandwidth=draw(st.sampled_from([0.0, 1.0, 20.0])),
        )
        for number in range(count)
    )
    named = [tuple(pair) for pair in combinations([d.name for d in devices], 2)]
    pairs = {
        (one, other): Connection(draw(seconds), draw(st.sampled_from([0.0, 2.0])))
        for one, other in named
        if draw(st.booleans())
    }
    shared = draw(st.sampled_from([None, *devices]))
    return devices, Network(pairs, shared or Device("draft", 0, 1.0, latency=draw(seconds)))


def every_placement(
    target: TargetCost, devices: tuple[Device, ...], network: Network
) -> list[Placement]:
    layers = len(target.layers)
    found = []
    for count in range(1, min(len(devices), layers) + 1):
        for cuts in combinations(range(1, layers), count - 1):
            ends = (0, *cuts, layers)
            spans = list(pairwise(ends))
            for chosen in permutations(devices, count):
                one = evaluate(target, network, list(zip(chosen, spans, strict=True)))
                fit = all(stage.memory <= stage.device.memory for stage in one.stages)
                if fit and target.refused.keys().isdisjoint(spans):
                    found.append(one)
    return found


@given(target=targets, cluster=networks(), rate=st.sampled_from(RATES))
def test_none_is_better_and_every_layer_is_placed_once(
    target: TargetCost, cluster: tuple[tuple[Device, ...], Network], rate: Any
) -> None:
    devices, network = cluster
    possible = every_placement(target, devices, network)
    found = place(target, devices, network, rate)
    assert (found is None) == (not possible)
    if found is None:
        return
    best = max(rate(one.slowest, one.whole) for one in possible)
    assert rate(found.slowest, found.whole) == pytest.approx(best)
    placed = [n for stage in found.stages for n in range(*stage.layers)]
    assert placed == list(range(len(target.layers)))
    assert all(stage.memory <= stage.device.memory for stage in found.stages)
    assert len({stage.device.name for stage in found.stages}) == len(found.stages)


@given(target=targets, cluster=networks(), stages=st.integers(1, 3), ordered=st.booleans())
def test_a_number_of_stages_and_an_order_may_be_given(
    target: TargetCost,
    cluster: tuple[tuple[Device, ...], Network],
    stages: int,
    ordered: bool,
) -> None:
    devices, network = cluster
    names = [device.name for device in devices]
    possible = [
        one
        for one in every_placement(target, devices, network)
        if len(one.stages) == stages
        and (not ordered or (order := [names.index(s.device.name) for s in one.stages]))
        and (not ordered or order == sorted(order))
    ]
    found = place(target, devices, network, mixed_rate, Constraints(stages, ordered=ordered))
    assert (found is None) == (not possible)
    if found is not None:
        best = max(mixed_rate(one.slowest, one.whole) for one in possible)
        assert mixed_rate(found.slowest, found.whole) == pytest.approx(best)


@given(target=targets, stages=st.one_of(st.none(), st.integers(1, 5)))
def test_a_target_can_be_cut_where_boundless_devices_hold_it(
    target: TargetCost, stages: int | None
) -> None:
    devices = [Device(f"d{number}", 10**9, 1.0) for number in range(5)]
    found = place(target, devices, Network(), plain_rate, Constraints(stages))
    assert target.can_be_cut(stages) == (found is not None)


def uniform(layers: int, head: int = 0) -> TargetCost:
    costs = [LayerCost(1000, 1000)] * (layers - 1) + [LayerCost(1000 + head, 1000 + head)]
    return TargetCost(tuple(costs))


def test_slower_devices_get_fewer_layers_and_the_last_one_has_the_head() -> None:
    devices = [Device("slow", 10**9, 1000.0), Device("fast", 10**9, 3000.0)]
    found = place(uniform(12, head=4000), devices, Network(), BALANCED)
    assert found is not None
    assert {s.device.name: s.layers for s in found.stages} == {"slow": (0, 4), "fast": (4, 12)}


def test_a_device_behind_a_slow_link_is_left_out() -> None:
    near = [Device("a", 10**9, 1e5, 1e-4), Device("b", 10**9, 1e5, 1e-4)]
    far = Device("far", 10**9, 1e5, latency=1.0)
    found = place(uniform(12), [far, *near], Network(), mixed_rate)
    assert found is not None
    assert {stage.device.name for stage in found.stages} == {"a", "b"}


def test_dozens_of_equal_devices_are_searched_in_every_order() -> None:
    devices = [Device(f"board-{number}", 6000, 1e5, 1e-3) for number in range(24)]
    found = place(uniform(80), devices, Network(), throughput_rate(64))
    assert found is not None
    assert max(end - first for first, end in (s.layers for s in found.stages)) == 4
    assert len(found.stages) == 20


def test_many_different_devices_keep_their_order() -> None:
    devices = [Device(f"d{number}", 10**9, 1000.0 + number) for number in range(14)]
    assert keeps_order(uniform(28), devices, Network())
    found = place(uniform(28), devices, Network(), BALANCED)
    assert found is not None
    names = [int(stage.device.name[1:]) for stage in found.stages]
    assert names == sorted(names)
    assert found.slowest == pytest.approx(max(s.seconds for s in found.stages))


@pytest.mark.parametrize(
    ("layers", "kinds", "all_orders"),
    [
        (64, [1] * 8, True),
        (64, [1] * 10, False),
        (16, [1] * 8, True),
        (80, [24], True),
        (80, [12, 12], True),
        (80, [6, 6, 6, 6], False),
    ],
)
def test_all_orders_are_searched_where_that_takes_seconds(
    layers: int, kinds: list[int], all_orders: bool
) -> None:
    assert (order_work(layers, kinds) <= MAX_WORK) == all_orders
    devices = [
        Device(f"d{kind}-{number}", 1, 1.0 + kind)
        for kind, count in enumerate(kinds)
        for number in range(count)
    ]
    assert keeps_order(uniform(layers), devices, Network()) != all_orders


def test_every_session_takes_memory_of_its_own() -> None:
    target = TargetCost((LayerCost(10, 10, slot=1, session=5),) * 4, slots=3, sessions=2)
    assert target.cache((0, 2)) == 2 * (3 + 2 * 5)
    assert target.memory((0, 4)) == 40 + 4 * 13
    assert place(target, [Device("d", 92, 1.0)], Network(), plain_rate) is not None
    assert place(target, [Device("d", 91, 1.0)], Network(), plain_rate) is None


def test_a_tied_matrix_is_held_once_by_a_single_stage() -> None:
    target = replace(uniform(2, head=500), whole=2100)
    assert place(target, [Device("d", 2100, 1.0)], Network(), plain_rate) is not None
    assert place(target, [Device("d", 2099, 1.0)], Network(), plain_rate) is None


@given(target=targets, first=st.integers(0, 5), length=st.integers(1, 5))
def test_the_search_and_the_costs_agree_to_the_bit(
    target: TargetCost, first: int, length: int
) -> None:
    layers = len(target.layers)
    span = (min(first, layers - 1), min(first + length, layers))
    if span[0] < span[1] and span not in target.refused:
        found = _span_seconds(target, Device("a", 1 << 40, 7.0))[span]
        assert found == target.seconds(span, 7.0)


def test_a_pass_is_reading_and_what_comes_besides() -> None:
    target = TargetCost((LayerCost(10, 10),) * 4, layer_seconds=0.5, pass_seconds=0.25)
    assert target.seconds((1, 3), 10.0) == 2.0 + 1.0 + 0.25
    assert target.speed((1, 3), 3.25) == 10.0
    # What was measured is shorter than what should come besides.
    assert target.speed((1, 3), 1.0) == pytest.approx(200.0)
    one = evaluate(target, Network(), [(Device("a", 99, 10.0), (0, 4))])
    assert one.stages[0].seconds == one.slowest == 6.25
